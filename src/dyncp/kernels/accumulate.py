"""Adding up a call's results where a kernel does not do so itself: plain torch, row by row.

The sum of a touched row is brought into one accumulator, added to there, and put where the call's
states say.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dyncp.kernels.call import Held, RowStates
from dyncp.kernels.kernel import Sums


@dataclass(frozen=True, slots=True)
class Run:
    """Touched rows that lie together and have the same states."""

    rows: slice
    before: Held
    after: Held


def list_runs(states: RowStates) -> list[Run]:
    if not len(states.after):
        return []
    changes = (np.diff(states.before) != 0) | (np.diff(states.after) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(states.after)]
    runs = [
        Run(slice(first, end), Held(states.before[first]), Held(states.after[first]))
        for first, end in pairwise(bounds)
    ]
    return [run for run in runs if run.after is not Held.UNTOUCHED]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def accumulator(sums: Sums, runs: list[Run]) -> Iterator[Tensor]:
    """The tensor that holds the rows' sums while they are added to."""
    wide = sums.wide
    if wide is None:
        wide = torch.empty_like(sums.final, dtype=accumulator_dtype(sums.final.dtype))
    for run in runs:
        if run.before is Held.NOTHING:
            wide[run.rows] = 0
        elif run.before is Held.FINAL and wide is not sums.final:
            wide[run.rows] = sums.final[run.rows]
    yield wide
    for run in runs:
        if run.after is Held.FINAL and wide is not sums.final:
            sums.final[run.rows] = wide[run.rows]


def open_lse(lse: Tensor, runs: list[Run]) -> None:
    for run in runs:
        if run.before is Held.NOTHING:
            lse[run.rows] = -torch.inf
