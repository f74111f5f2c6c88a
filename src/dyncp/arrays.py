"""Array types of the planning stages, read-only arrays, sorting, and tables by rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dyncp.compiled import compiled

Bool = npt.NDArray[np.bool_]
UInt8 = npt.NDArray[np.uint8]
Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Columns:
    """Base of tables: dataclasses whose fields are arrays of equal length."""

    def columns(self) -> list[npt.NDArray[Any]]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def __len__(self) -> int:
        return len(self.columns()[0])

    def select(self, rows: npt.NDArray[Any]) -> Self:
        """The table with these rows only, given as indices or as a mask."""
        return type(self)(*(column[rows] for column in self.columns()))


def frozen(values: Any, dtype: type[np.generic] = np.int32) -> npt.NDArray[Any]:
    """A read-only contiguous array, which stages pass to each other.

    A writable array is copied, so that the caller's own array stays writable.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    if array is values and array.flags.writeable:
        array = array.copy()
    array.flags.writeable = False
    return array


def starts_of(sizes: npt.NDArray[Any]) -> Int64:
    """Offsets of consecutive pieces, and the end: sizes [3, 1, 2] give [0, 3, 4, 6]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


Column = npt.NDArray[Any]


def sorted_order(*columns: tuple[Column, int]) -> Int64:
    """A stable order like `np.lexsort`: by the last column, then by the one before it, and so on.

    The values of each (column, n) are in [0, n).
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
    """The distinct (major, minor) pairs in order, and for every given pair its index among them.

    Majors [1, 0, 1] with minors [5, 7, 5] give [0, 1], [7, 5] and [1, 0, 1].
    """
    order = sorted_order((minor, num_minor), (major, num_major))
    major, minor = (column[order].astype(np.int64) for column in (major, minor))
    new = np.ones(len(order), np.bool_)
    new[1:] = (major[1:] != major[:-1]) | (minor[1:] != minor[:-1])
    index = np.empty(len(order), np.int64)
    index[order] = np.cumsum(new) - 1
    return major[new], minor[new], index


Table = TypeVar("Table")


def split_by_rank(
    table: Callable[..., Table], columns: Sequence[npt.NDArray[Any]], of_rank: Int64
) -> list[Table]:
    """One table of read-only views per rank: rank r has rows of_rank[r] to of_rank[r + 1].

    Makes the columns themselves read-only."""
    for column in columns:
        column.flags.writeable = False
    return [
        table(*[column[first:end] for column in columns])
        for first, end in pairwise(of_rank.tolist())
    ]


def bounds_of_ranks(rank: Int64 | Int32, num_ranks: int) -> Int64:
    """Where the rows of each rank begin if rows are ordered by rank, and the end."""
    return starts_of(np.bincount(rank, minlength=num_ranks))


def ranges_of(first: Int64, counts: Int64 | Int32) -> Int64:
    """For every i, the counts[i] numbers from first[i] on: [5, 0] and [2, 1] give 5, 6, 0."""
    starts = starts_of(counts)
    step = np.arange(starts[-1])
    return step + np.repeat(first - starts[:-1], counts)
