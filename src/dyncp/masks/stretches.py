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
        if _fill_gaps(np.ascontiguousarray(mask.ranges), gaps) == 1:  # the first token is one
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


@compiled
def _fill_gaps(ranges: Int32, gaps: Bools) -> int:
    """Clears the gaps of tokens that attend the row before them; returns how many gaps are left."""
    left = 0
    for token in range(len(gaps)):
        for column in range(ranges.shape[1]):
            if ranges[token, column, 0] < token <= ranges[token, column, 1]:
                gaps[token] = False
        left += gaps[token]
    return left


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
