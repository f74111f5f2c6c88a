"""Tables that hold the rows of rank 0, then those of rank 1, and so on, cut into ranks."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32, Int64, starts_of

Table = TypeVar("Table")


def split_by_rank(
    table: Callable[..., Table], columns: Sequence[npt.NDArray[Any]], of_rank: Int64
) -> list[Table]:
    """One table per rank, with read-only views: rank r has rows of_rank[r] to of_rank[r + 1].

    Takes the columns over: nobody may write to them any more."""
    for column in columns:
        column.flags.writeable = False
    return [
        table(*[column[first:end] for column in columns])
        for first, end in pairwise(of_rank.tolist())
    ]


def bounds_of_ranks(rank: Int64 | Int32, num_ranks: int) -> Int64:
    """Where each rank's rows begin when rows are ordered by rank, and the end."""
    return starts_of(np.bincount(rank, minlength=num_ranks))


def ranges_of(first: Int64, counts: Int64 | Int32) -> Int64:
    """first[i], first[i]+1, ... (counts[i] numbers) for every i: [5, 0], [2, 1] gives 5, 6, 0."""
    starts = starts_of(counts)
    step = np.arange(starts[-1])
    return step + np.repeat(first - starts[:-1], counts)
