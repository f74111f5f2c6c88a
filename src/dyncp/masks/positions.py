"""Windows and chunks by position inside any mask, and the token that precedes each token.

In branching sequences a token's position differs from its row. A window of rows before a token of
an answer would contain tokens of other answers instead of the end of the question. `within` counts
positions, which is what models with local layers mean.

Layers with state need something that attention does not: the preceding token in the same text.
`find_stretches` derives it from masks and positions. A stretch is a run of consecutive rows, each
of which follows the row before it. It begins a document, or it continues from a token of another
stretch, as a branch does.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.checks import instance_of
from dyncp.masks.function import DerivedMask, MaskFunction, ParametricMask, integer
from dyncp.masks.mask import (
    Mask,
    columns,
    default_positions,
    merge,
    normal_mask,
    positions_and_targets,
)
from dyncp.masks.pairs import LinearRanges

# In place of a preceding token: none, at the start of a document; not determined.
NOTHING, UNCLEAR = -1, -2
AnyMask = TypeVar("AnyMask", Mask, MaskFunction)


def within(mask: AnyMask, *, window: int | None = None, chunk: int | None = None) -> AnyMask:
    """The pairs of a mask (or mask function) whose key is at one of the last `window` positions up
    to the query's own, or in the same chunk of `chunk` positions as the query.

    within(shared_question(answers=2, question=2), window=2), of 6 tokens    position
    █·····                                                                   0
    ██····                                                                   1
    ·██···                                                                   2
    ··██··                                                                   3
    ·█··█·                                                                   2
    ····██                                                                   3
    """
    if (window is None) == (chunk is None):
        raise ValueError(f"masks.within got window={window} and chunk={chunk}; give one of them")
    kind, given = ("chunk", chunk) if window is None else ("window", window)
    size = integer("within", kind, given, 1)
    if not isinstance(mask, Mask):
        expected = "a mask, or a mask function such as masks.causal"
        instance_of("the mask of masks.within", mask, MaskFunction, expected)
        local = partial(within, window=window, chunk=chunk)
        return DerivedMask(local, (mask,), f"masks.within({mask!r}, {kind}={given})")
    position = mask.resolved_positions().astype(np.int64)
    low = position // size * size if window is None else position - size + 1
    high = low + size
    return normal_mask(_clip(mask, low, high), mask.marks, f"{mask.name} within {size}")


def _clip(mask: Mask, low: Int64, high: Int64) -> Int32:
    """The ranges of every token, restricted to keys with low <= position < high. Ranges are split
    wherever positions of consecutive rows are not consecutive, so row − position is constant within
    a piece."""
    positions, rows = mask.resolved_positions(), np.arange(mask.length)
    borders = np.flatnonzero(np.diff(positions) != 1) + 1
    run_end = np.append(borders, mask.length)[np.searchsorted(borders, rows, side="right")]
    starts, ends = [], []
    for column in mask.ranges.transpose(1, 2, 0).astype(np.int64):
        start, end = column
        while (start < end).any():
            first = start.clip(max=mask.length - 1)
            border = np.minimum(end, run_end[first])
            shift = first - positions[first]  # row = position + shift
            starts.append(np.maximum(start, low + shift))
            ends.append(np.minimum(border, high + shift))
            ends[-1][start >= end] = 0
            start = np.maximum(start, border)
    if not starts:
        return mask.ranges
    return merge(np.array(starts, np.int32).clip(0), np.array(ends, np.int32).clip(0))


def window_of(mask: Mask) -> int | None:
    """The size in rows of a mask's sliding window, which keys leave one by one; of the largest one.
    None if there is none, or if the sequence is too short to show it."""
    starts, ends = columns(mask.ranges)
    first = np.where(starts < ends, starts, -1).max(axis=0)  # of each token's last range
    moved = np.flatnonzero((first[1:] == first[:-1] + 1) & (first[:-1] >= 0)) + 1
    return int((moved - first[moved]).max()) + 1 if len(moved) else None


def windows_of(function: Any) -> Iterator[int]:
    """The windows that a mask function was given: its own, and those of functions in it."""
    if isinstance(function, ParametricMask):
        window = {**function.defaults, **function.parameters}.get("window")
        if isinstance(window, int):
            yield window
    elif isinstance(function, DerivedMask):
        window = getattr(function.operation, "keywords", {}).get("window")
        if window is not None:
            yield window
        for source in function.sources:
            yield from windows_of(source)


def find_stretches(masks: Sequence[Mask]) -> tuple[Int64, Int64]:
    """The first token of each stretch of a sequence with these masks, and the token that precedes
    it: NOTHING if a document begins, UNCLEAR if it cannot be determined.

    A token follows the row before it if any mask lets it attend that row. Otherwise it follows the
    nearest earlier key that it attends, if that key is at the preceding position. Otherwise, if its
    position is 0 and it attends nothing before it, it begins a document.

    shared_question(6, answers=2, question=2) has two stretches: the question and the first answer
    begin at token 0, and the second answer begins at token 4 and follows token 1.
    """
    token = default_positions(masks[0].length)[:, None]
    gaps = np.ones(len(token), np.bool_)  # tokens that do not follow the row before them
    for mask in masks:
        start, end = mask.ranges[:, :, 0], mask.ranges[:, :, 1]
        gaps &= ~((start < token) & (token <= end)).any(axis=1)
    positions = positions_and_targets(masks).positions
    if positions is None:
        positions = default_positions(masks[0].length)
    starts = np.flatnonzero(gaps)
    before = _nearest(masks, starts, positions)
    before[(before == NOTHING) & (positions[starts] != 0)] = UNCLEAR
    before[0] = NOTHING
    for mask in masks:  # the tokens of a document attend nothing before it
        earliest = np.minimum.reduceat(mask.ranges[:, 0, 0], starts)
        before[(before == NOTHING) & (earliest < starts)] = UNCLEAR
    return starts, before


def single_stretches(runs: LinearRanges) -> Bool:
    """`bool[sequences]`: whether a sequence is certainly a single stretch, because every token
    attends the row before it. May miss some, because it needs one range to contain these keys for
    all rows of a run, but takes 0.1 ms for 500 documents; `find_stretches` takes 40 to 70 ms."""
    end = np.append(runs.start[1:], 0)
    end[runs.first[1:] - 1] = runs.lengths
    first, attended = np.maximum(runs.start, 1), np.ones(runs.base.shape[:2], np.bool_)
    for row in (first, end - 1):  # linear bounds that hold at both ends also hold in between
        ranges = runs.base + (row - runs.start)[:, None, None] * runs.slope
        attended &= (ranges[:, :, 0] < row[:, None]) & (row[:, None] <= ranges[:, :, 1])
    follows = attended.any(axis=1) | (first >= end)
    single: Bool = np.logical_and.reduceat(follows, runs.first[:-1])
    return single


def _nearest(masks: Sequence[Mask], tokens: Int64, positions: Int32) -> Int64:
    """The nearest earlier key that each token attends, if that key is at the preceding position.
    NOTHING if the token attends no earlier key; UNCLEAR if the nearest keys of all masks are at
    other positions, or if several masks have different ones at the preceding position."""
    nearest = []  # per mask: the last earlier key that each token attends, or NOTHING
    for mask in masks:
        start, end = mask.ranges[tokens].transpose(2, 0, 1)
        end = np.minimum(end, tokens[:, None])
        nearest.append(np.where(start < end, end - 1, NOTHING).max(axis=1))
    keys = np.stack(nearest)
    right = (keys >= 0) & (positions[keys] + 1 == positions[tokens])
    highest = np.where(right, keys, NOTHING).max(axis=0)
    several = (right & (keys != highest)).any(axis=0)
    alone = (keys == NOTHING).all(axis=0)
    found: Int64 = np.where(several | ((highest == NOTHING) & ~alone), UNCLEAR, highest)
    return found
