"""Which tokens see what they predict, and masks whose tokens predict labels of their own place.

Training a token on a target that it can see teaches it to copy. A token sees its target if it
attends it, or if it attends a token that does (through a second layer). Causal masks never let a
token see the next one.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.checks import instance_of
from dyncp.compiled import compiled, inner
from dyncp.masks.function import DerivedMask, MaskFunction
from dyncp.masks.mask import Mask, default_positions, normal_mask

AnyMask = TypeVar("AnyMask", Mask, MaskFunction)


def own_labels(mask: AnyMask) -> AnyMask:
    """The same mask (or mask function), but every token predicts the label of its own place instead
    of the next one: for masked-language training and tagging. Samples need labels."""
    if isinstance(mask, Mask):
        own = mask.marks._replace(targets=default_positions(mask.length), branches=None)
        return normal_mask(mask.ranges, own, f"{mask.name} with own labels")
    expected = "a mask, or a mask function such as masks.full"
    instance_of("the mask of masks.own_labels", mask, MaskFunction, expected)
    return DerivedMask(partial(own_labels), (mask,), f"masks.own_labels({mask!r})")


def sees_target(masks: Sequence[Mask], token: Int64, target: Int64) -> Bool:
    """`bool[n]`: whether each of these tokens of one sequence sees its target under any of the
    masks, which are those of different layers: directly, or through one other token."""
    seen = np.zeros(len(token), np.bool_)
    ahead = [mask.ranges[:, :, 1].max(axis=1) > np.arange(1, mask.length + 1) for mask in masks]
    if (target > token).all() and not any(some.any() for some in ahead):
        return seen
    for mask in masks:
        start, end = mask.ranges[token].transpose(2, 0, 1)
        seen |= ((start <= target[:, None]) & (target[:, None] < end)).any(axis=1)
    rest = np.flatnonzero(~seen)
    rest = rest[np.argsort(target[rest], kind="stable")]
    ranges = np.concatenate([mask.ranges for mask in masks], axis=1)
    seen[rest] = _attends_a_reader(ranges, token[rest], target[rest])
    return seen


@compiled
def _attends_a_reader(ranges: Int32, token: Int64, target: Int64) -> Bool:
    """Whether each token attends a reader of its target: a token that attends the target. Targets
    are in ascending order.

    Goes through all keys in order and keeps the ranges that contain the key. `counts` is a binary
    indexed tree with the number of these ranges by token.
    """
    length, num_ranges = ranges.shape[:2]
    counts = np.zeros(length + 1, np.int64)
    found = np.zeros(len(token), np.bool_)
    by_start = np.argsort(ranges[:, :, 0].copy().reshape(-1))
    by_end = np.argsort(ranges[:, :, 1].copy().reshape(-1))
    first = last = 0
    for number in range(len(token)):
        key = target[number]
        while first < len(by_start) and _at(ranges, by_start[first], 0) <= key:
            _add(counts, by_start[first] // num_ranges, 1)
            first += 1
        while last < len(by_end) and _at(ranges, by_end[last], 1) <= key:
            _add(counts, by_end[last] // num_ranges, -1)
            last += 1
        for column in range(num_ranges):
            start, end = ranges[token[number], column, 0], ranges[token[number], column, 1]
            if start < end and _sum(counts, end) > _sum(counts, start):
                found[number] = True
    return found


@inner
def _at(ranges: Int32, place: int, side: int) -> int:
    bound: int = ranges[place // ranges.shape[1], place % ranges.shape[1], side]
    return bound


@inner
def _add(counts: Int64, row: int, change: int) -> None:
    place = row + 1
    while place < len(counts):
        counts[place] += change
        place += place & -place


@inner
def _sum(counts: Int64, rows: int) -> int:
    """The sum over the first `rows` rows."""
    total, place = 0, rows
    while place > 0:
        total += counts[place]
        place -= place & -place
    return total
