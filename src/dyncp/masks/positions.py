"""Positions: windows and chunks by position inside any other mask, and which token comes before a
token in its text.

In branching sequences a token's position is not its row. A window of rows around a token of an
answer would hold tokens of other answers instead of the end of the question; `within` counts
positions, which is what models with local layers mean. Layers with state need what attention does
not: the token before a token. `find_stretches` derives it from masks and positions. A stretch is
consecutive rows that follow each other in one text; it begins a document, or continues from a token
of another stretch, as a branch does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.checks import instance_of
from dyncp.masks.function import MaskFunction, Sample, integer
from dyncp.masks.mask import Mask, default_positions, merge, normal_mask, positions_and_targets
from dyncp.masks.pairs import LinearRanges

NOTHING, UNCLEAR = -1, -2  # before a document; where masks and positions do not determine it


@dataclass(frozen=True, eq=False, repr=False)
class WithinMask(MaskFunction):
    """What `masks.within` returns for a mask function."""

    function: MaskFunction
    window: int | None
    chunk: int | None

    def build(self, length: int, sample: Sample | None) -> Mask:
        return within(self.function.build(length, sample), window=self.window, chunk=self.chunk)

    def __repr__(self) -> str:
        size = f"chunk={self.chunk}" if self.window is None else f"window={self.window}"
        return f"masks.within({self.function!r}, {size})"


@overload
def within(mask: Mask, *, window: int | None = None, chunk: int | None = None) -> Mask: ...


@overload
def within(
    mask: MaskFunction, *, window: int | None = None, chunk: int | None = None
) -> MaskFunction: ...


def within(
    mask: Mask | MaskFunction, *, window: int | None = None, chunk: int | None = None
) -> Mask | MaskFunction:
    """The pairs of a mask (or mask function) whose key is one of the last `window` positions up to
    the query's, or in the query's chunk of `chunk` positions.

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
        return WithinMask(mask, window, chunk)
    position = mask.resolved_positions().astype(np.int64)
    low = position // size * size if window is None else position - size + 1
    high = low + size
    return normal_mask(_clip(mask, low, high), mask.marks, f"{mask.name} within {size}")


def _clip(mask: Mask, low: Int64, high: Int64) -> Int32:
    """The ranges of every token, cut to keys with positions from `low` to before `high`. Ranges are
    split where consecutive rows do not have consecutive positions; inside a piece row − position is
    constant."""
    positions, rows = mask.resolved_positions(), np.arange(mask.length)
    borders = np.flatnonzero(np.diff(positions) != 1) + 1
    run_end = np.append(borders, mask.length)[np.searchsorted(borders, rows, side="right")]
    starts, ends = [], []
    for column in mask.ranges.transpose(1, 2, 0).astype(np.int64):
        start, end = column
        while (start < end).any():
            first = start.clip(max=mask.length - 1)
            border = np.minimum(end, run_end[first])
            shift = first - positions[first]  # from positions to rows
            starts.append(np.maximum(start, low + shift))
            ends.append(np.minimum(border, high + shift))
            ends[-1][start >= end] = 0
            start = np.maximum(start, border)
    if not starts:
        return mask.ranges
    return merge(np.array(starts, np.int32).clip(0), np.array(ends, np.int32).clip(0))


def find_stretches(masks: Sequence[Mask]) -> tuple[Int64, Int64]:
    """First tokens of the stretches of a sequence with these masks, and the token before each:
    NOTHING where a document begins, UNCLEAR where it cannot be determined.

    A token follows the row before it if some mask lets it attend that row. Else it follows the
    nearest key before it, if that has the position before its own. Else, if its position is 0 and
    it attends nothing before it, it begins a document.

    shared_question(6, answers=2, question=2) has the question and its first answer in one stretch
    from 0 on, and the second answer in one from 4 on, which follows token 1.
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
    for mask in masks:  # documents attend nothing before them
        earliest = np.minimum.reduceat(mask.ranges[:, 0, 0], starts)
        before[(before == NOTHING) & (earliest < starts)] = UNCLEAR
    return starts, before


def single_stretches(runs: LinearRanges) -> Bool:
    """Which sequences are a single stretch: all of their tokens attend the row before them. Asks
    whether one range does it for all rows of a run, so it may miss some; `find_stretches` does not.
    """
    end = np.append(runs.start[1:], 0)
    end[runs.first[1:] - 1] = runs.lengths
    first, attended = np.maximum(runs.start, 1), np.ones(runs.base.shape[:2], np.bool_)
    for row in (first, end - 1):  # what holds at both ends of a line holds between them
        ranges = runs.base + (row - runs.start)[:, None, None] * runs.slope
        attended &= (ranges[:, :, 0] < row[:, None]) & (row[:, None] <= ranges[:, :, 1])
    follows = attended.any(axis=1) | (first >= end)
    single: Bool = np.logical_and.reduceat(follows, runs.first[:-1])
    return single


def _nearest(masks: Sequence[Mask], tokens: Int64, positions: Int32) -> Int64:
    """The nearest key before each token if it has the position before the token's own; NOTHING
    where a token attends none before it, UNCLEAR where there is no such key, or several."""
    nearest = []  # the last key before each token that it attends, or NOTHING
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
