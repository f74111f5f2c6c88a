"""Stretches: rows of a sequence that follow each other in one text.

What attention cannot say, layers with state need to know: which token comes before a token. A
stretch begins a document, or goes on from a token of another stretch, as a branch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dyncp.masks.function import positions_and_targets
from dyncp.masks.mask import Mask, default_positions
from dyncp.masks.ranges import IntArray

NOTHING, UNCLEAR = -1, -2  # before a document; where masks and positions do not tell

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def find_stretches(masks: Sequence[Mask]) -> tuple[Ints, Ints]:
    """First tokens of the stretches of one sequence, whose masks these are, and the token before
    each: NOTHING where a document begins, UNCLEAR where it cannot be told.

    A token follows the row before it if some mask lets it attend that row, or if its position is
    one more (windows and chunks may hide the row) and masks connect what lies before it with the
    rest. Else it follows the nearest key before it, if that has the position before its own. Else,
    if its position is 0 and it attends nothing before it, it begins a document.

    shared_question(6, answers=2, question=2) has the question and its first answer in one stretch
    from 0 on, and the second answer in one from 4 on, which follows token 1.
    """
    length = masks[0].length
    positions = positions_and_targets(masks).positions
    if positions is None:
        positions = default_positions(length)
    follows = np.zeros(length, np.bool_)
    for mask in masks:
        follows |= _attends_row_before(mask.ranges)
    tokens = np.flatnonzero(~follows)[1:]  # never the first one, which nothing is before
    if not len(tokens):
        return np.zeros(1, np.int64), np.full(1, NOTHING)
    goes_on = positions[tokens] == positions[tokens - 1] + 1
    if goes_on.any():
        borders = ~goes_on | _parted(masks)[tokens]
        tokens, goes_on = tokens[borders], goes_on[borders]
    before = np.where(goes_on, UNCLEAR, _nearest(masks, tokens, positions))
    before[(before == NOTHING) & (positions[tokens] != 0)] = UNCLEAR
    starts, before = np.append(0, tokens), np.append(NOTHING, before)
    for mask in masks:  # documents attend nothing before them
        earliest = np.minimum.reduceat(mask.ranges[:, 0, 0], starts)
        before[(before == NOTHING) & (earliest < starts)] = UNCLEAR
    return starts, before


def _attends_row_before(ranges: IntArray) -> Bools:
    row = np.arange(-1, len(ranges) - 1)[:, None]
    found: Bools = np.any((ranges[:, :, 0] <= row) & (row < ranges[:, :, 1]), axis=1)
    return found


def _parted(masks: Sequence[Mask]) -> Bools:
    """Whether no mask lets this or a later token attend an earlier one, nor the other way round."""
    length = masks[0].length
    token, parted = np.arange(length), np.ones(length, np.bool_)
    for mask in masks:
        start, end = mask.ranges[:, :, 0], mask.ranges[:, :, 1]
        first = np.minimum.accumulate(start[::-1, 0])[::-1]
        last = np.maximum.accumulate(np.where(start < end, end, 0).max(axis=1))
        parted &= (first >= token) & (np.append(0, last[:-1]) <= token)
    return parted


def _nearest(masks: Sequence[Mask], tokens: Ints, positions: IntArray) -> Ints:
    """The nearest key before each token that has the position before its own; NOTHING where a token
    attends none before it, UNCLEAR where masks do not agree on one."""
    before = np.full(len(tokens), NOTHING, np.int64)
    for mask in masks:
        start, end = (mask.ranges[tokens, :, side] for side in (0, 1))
        end = np.minimum(end, tokens[:, None])
        key = np.where(start < end, end - 1, NOTHING).max(axis=1)
        right = positions[np.maximum(key, 0)] + 1 == positions[tokens]
        found = np.where((key >= 0) & ~right, UNCLEAR, key)
        before = np.where((before == NOTHING) | (before == found), found, before)
        before[(found != NOTHING) & (found != before)] = UNCLEAR
    return before
