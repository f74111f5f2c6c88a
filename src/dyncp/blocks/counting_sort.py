"""Sorting small whole numbers (ranks, blocks, phases) in linear time."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int64
from dyncp.compiled import compiled

Column = npt.NDArray[Any]


def sorted_order(*columns: tuple[Column, int]) -> Int64:
    """Like `np.lexsort`: the stable order by the last column, ties by the one before it, and so on.

    Each column comes with its number of keys; its values are in [0, that number).
    """
    order = np.arange(len(columns[0][0]))
    for keys, num_keys in columns:
        order = _sort_pass(order, keys.astype(np.int64), num_keys)
    return order


@compiled
def _sort_pass(order: Int64, keys: Int64, num_keys: int) -> Int64:
    place = np.zeros(num_keys + 1, np.int64)
    for key in keys:
        place[key + 1] += 1
    for key in range(num_keys):
        place[key + 1] += place[key]
    moved = np.empty_like(order)
    for index in order:
        key = keys[index]
        moved[place[key]] = index
        place[key] += 1
    return moved


def distinct_pairs(
    major: Column, num_major: int, minor: Column, num_minor: int
) -> tuple[Int64, Int64, Int64]:
    """Distinct (major, minor), ordered, and for every given pair its index among them.

    Majors [1, 0, 1] with minors [5, 7, 5] give [0, 1], [7, 5] and [1, 0, 1].
    """
    order = sorted_order((minor, num_minor), (major, num_major))
    major, minor = (column[order].astype(np.int64) for column in (major, minor))
    new = np.ones(len(order), np.bool_)
    new[1:] = (major[1:] != major[:-1]) | (minor[1:] != minor[:-1])
    index = np.empty(len(order), np.int64)
    index[order] = np.cumsum(new) - 1
    return major[new], minor[new], index
