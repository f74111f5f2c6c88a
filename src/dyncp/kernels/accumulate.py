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

from dyncp.kernels.kernel import RowState, RowStates, Sums


def merge_partial(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges a partial result into `out` [rows, heads, dim] and `lse` [rows, heads] in place.

    Each partial output is a softmax over its own keys; its share of the whole is
    exp(its log-sum-exp − the joint one). A side that attended nothing has log-sum-exp −∞ and
    share 0, also when both have.
    """
    total = torch.logaddexp(lse, new_lse)
    old_share, new_share = (_share(side, total) for side in (lse, new_lse))
    out.mul_(old_share.unsqueeze(-1)).add_(new_out * new_share.unsqueeze(-1))
    lse.copy_(total)


def _share(lse: Tensor, total: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))


@dataclass(frozen=True, slots=True)
class Run:
    """Touched rows that lie together and have the same states."""

    rows: slice
    before: RowState
    after: RowState


def list_runs(states: RowStates) -> list[Run]:
    if not len(states.after):
        return []
    changes = (np.diff(states.before) != 0) | (np.diff(states.after) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(states.after)]
    runs = [
        Run(slice(first, end), RowState(states.before[first]), RowState(states.after[first]))
        for first, end in pairwise(bounds)
    ]
    return [run for run in runs if run.after is not RowState.UNTOUCHED]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def accumulator(sums: Sums, runs: list[Run]) -> Iterator[Tensor]:
    """The tensor that holds the rows' sums while they are added to."""
    wide = sums.wide
    if wide is None:
        wide = torch.empty_like(sums.final, dtype=accumulator_dtype(sums.final.dtype))
    for run in runs:
        if run.before is RowState.NOTHING:
            wide[run.rows] = 0
        elif run.before is RowState.FINAL and wide is not sums.final:
            wide[run.rows] = sums.final[run.rows]
    yield wide
    for run in runs:
        if run.after is RowState.FINAL and wide is not sums.final:
            sums.final[run.rows] = wide[run.rows]


def open_lse(lse: Tensor, runs: list[Run]) -> None:
    for run in runs:
        if run.before is RowState.NOTHING:
            lse[run.rows] = -torch.inf
