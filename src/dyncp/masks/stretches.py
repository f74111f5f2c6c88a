"""Stretches: rows of a sequence that follow each other in one text.

What attention cannot say, layers with state need to know: which token comes before a token. A
stretch begins a document, or continues from a token of another stretch, as a branch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32
from dyncp.compiled import compiled
from dyncp.masks.function import positions_and_targets
from dyncp.masks.linear_ranges import join_ranges
from dyncp.masks.mask import Mask, default_positions

NOTHING, UNCLEAR = -1, -2  # before a document; where masks and positions do not tell
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def find_stretches(masks: Sequence[Mask]) -> tuple[Ints, Ints]:
    """First tokens of the stretches of one sequence, whose masks these are, and the token before
    each: NOTHING where a document begins, UNCLEAR where it cannot be told.

    A token follows the row before it if some mask lets it attend that row. Else it follows the
    nearest key before it, if that has the position before its own. Else, if its position is 0 and
    it attends nothing before it, it begins a document.

    shared_question(6, answers=2, question=2) has the question and its first answer in one stretch
    from 0 on, and the second answer in one from 4 on, which follows token 1.
    """
    gaps = np.ones(masks[0].length, np.bool_)  # tokens that do not follow the row before them
    for mask in masks:
        left = np.empty(1, np.int64)
        _count_gaps(*join_ranges([mask.ranges])[0], gaps, left)
        if left[0] == 1:  # the first token is one
            return np.zeros(1, np.int64), np.full(1, NOTHING)
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


def count_gaps(masks: Sequence[Mask]) -> Ints:
    """Of every sequence, how many tokens do not attend the row before them: 1 where all are one
    stretch."""
    joined = join_ranges([mask.ranges for mask in masks])
    counts = [np.empty(len(own.lengths), np.int64) for own in joined]
    for own, left in zip(joined, counts, strict=True):
        _count_gaps(*own, np.ones(int(own.lengths.sum()), np.bool_), left)
    return np.concatenate(counts)


@compiled
def _count_gaps(cells: Int32, lengths: Ints, columns: Ints, gaps: Bools, left: Ints) -> None:
    """Tokens that attend the row before them are no gaps; `left` says how many a sequence has."""
    cell = row = 0
    for sequence in range(len(lengths)):
        left[sequence] = 0
        for token in range(lengths[sequence]):
            for _ in range(columns[sequence]):
                if cells[cell, 0] < token <= cells[cell, 1]:
                    gaps[row] = False
                cell += 1
            left[sequence] += gaps[row]
            row += 1


def _nearest(masks: Sequence[Mask], tokens: Ints, positions: Int32) -> Ints:
    """The nearest key before each token if it has the position before the token's own; NOTHING
    where a token attends none before it, UNCLEAR where masks tell no such key, or several."""
    keys = np.stack([_nearest_keys(mask.ranges[tokens], tokens) for mask in masks])
    right = (keys >= 0) & (positions[keys] + 1 == positions[tokens])
    highest = np.where(right, keys, NOTHING).max(axis=0)
    several = (right & (keys != highest)).any(axis=0)
    alone = (keys == NOTHING).all(axis=0)
    found: Ints = np.where(several | ((highest == NOTHING) & ~alone), UNCLEAR, highest)
    return found


def _nearest_keys(ranges: Int32, tokens: Ints) -> Ints:
    """The last key before each token that it attends, or NOTHING."""
    start, end = ranges[:, :, 0], np.minimum(ranges[:, :, 1], tokens[:, None])
    keys: Ints = np.where(start < end, end - 1, NOTHING).max(axis=1)
    return keys
