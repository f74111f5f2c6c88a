"""Kernel `reference`: plain fp64 attention, which defines what a call means. Kernel `cpu` derives
from it and replaces its arithmetic."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyncp.kernels.kernel import (
    BackwardInputs,
    Gradients,
    IndexArrays,
    Kernel,
    KernelCall,
    RowState,
    RowStates,
    Sums,
)
from dyncp.kernels.row_ops import accumulator_dtype, merge_partial

Three = tuple[Tensor, Tensor, Tensor]  # q, k, v, or their gradients


class Run(NamedTuple):
    """Consecutive touched rows with the same states."""

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


@contextmanager
def accumulator(sums: Sums, runs: list[Run]) -> Iterator[Tensor]:
    """Yields a tensor of the accumulator dtype that holds the rows' sums. Afterwards, rows that are
    FINAL after this call are rounded into `sums.final`."""
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


@dataclass(frozen=True)
class RowTile:
    """Consecutive query rows, and the key rows that they are computed with."""

    rows: slice
    columns: Tensor  # key rows
    allowed: Tensor  # bool [rows, columns]

    def parts(self, by_row: Iterable[Tensor], by_key: Iterable[Tensor]) -> Iterator["RowTile"]:
        """The tile itself, or its single rows if one of these tensors is not finite in the tile."""
        finite = all(x[self.rows].isfinite().all() for x in by_row)
        if finite and all(x[self.columns].isfinite().all() for x in by_key):
            yield self
        else:
            yield from self.single_rows()

    def single_rows(self) -> Iterator["RowTile"]:
        """One tile per row, with only the keys that the row may attend. Other keys are left out
        because 0 × NaN and 0 × infinity are NaN."""
        for index, allowed in enumerate(self.allowed):
            if allowed.any():
                row = self.rows.start + index
                yield RowTile(slice(row, row + 1), self.columns[allowed], allowed[allowed][None])


def attend_tile(tile: RowTile, inputs: Three, scale: float, out: Tensor, lse: Tensor) -> None:
    """Merges the attention of a tile into the rows of `out` and `lse`."""
    q, k, v = inputs
    scores = _scores(q[tile.rows], k[tile.columns], scale, tile.allowed)
    tile_lse = scores.logsumexp(dim=-1)
    weights = _weights(scores, tile_lse)
    values = torch.einsum("hqk,khd->qhd", weights, _per_q_head(v[tile.columns], q))
    merge_partial(out[tile.rows], lse[tile.rows], values.to(out.dtype), tile_lse.T.to(lse.dtype))


def attend_tile_backward(tile: RowTile, inputs: BackwardInputs, scale: float, grads: Three) -> None:
    """Adds the gradients of a tile to `grads`: dq, dk, dv."""
    (q, k, v, dout, lse, delta), (dq, dk, dv) = inputs, grads
    keys, values = _per_q_head(k[tile.columns], q), _per_q_head(v[tile.columns], q)
    queries, gradient = q[tile.rows].double(), dout[tile.rows].double()
    scores = _scores(q[tile.rows], k[tile.columns], scale, tile.allowed)
    weights = _weights(scores, lse[tile.rows].double().T)
    row_sum = delta[tile.rows].double().T.unsqueeze(-1)
    dweights = torch.einsum("qhd,khd->hqk", gradient, values)
    dscores = weights * (dweights - row_sum) * scale
    dq[tile.rows] += torch.einsum("hqk,khd->qhd", dscores, keys).to(dq.dtype)
    tile_dk = torch.einsum("hqk,qhd->khd", dscores, queries)
    tile_dv = torch.einsum("hqk,qhd->khd", weights, gradient)
    dk[tile.columns] += _per_kv_head(tile_dk, k).to(dk.dtype)
    dv[tile.columns] += _per_kv_head(tile_dv, v).to(dv.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """Masked scores [q heads, rows, columns]."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), _per_q_head(k, q)) * scale
    return scores.masked_fill(~allowed, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores − lse); 0 in rows that attend nothing, whose lse is −∞."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


def _per_q_head(kv: Tensor, q: Tensor) -> Tensor:
    """[rows, kv heads, dim] in fp64, each kv head repeated for the q heads it serves."""
    return kv.double().repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _per_kv_head(grad: Tensor, kv: Tensor) -> Tensor:
    """Sums the gradients of the q heads that share a kv head."""
    _, kv_heads, dim = kv.shape
    return grad.view(len(grad), kv_heads, -1, dim).sum(dim=2)


@dataclass(frozen=True, slots=True)
class PlainCall:
    tiles: list[Any]  # what `list_tiles` returned
    q_runs: list[Run]
    k_runs: list[Run]


class ReferenceKernel(Kernel):
    """Plain fp64 attention, `rows` query rows at a time. A pair is computed if it is in a rectangle
    of the call and the key's coordinate is in one of the query row's ranges.

    A call loads the sums of touched rows into one accumulator, adds its tiles there, and stores the
    sums as the row states say. Subclasses may override `list_tiles`, `add_outputs` and
    `add_gradients`."""

    name = "reference"

    def __init__(self, rows: int = 128) -> None:
        self._rows = rows

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:  # noqa: ARG002
        tiles = self.list_tiles(call, arrays.device)
        return PlainCall(tiles, list_runs(call.q_states), list_runs(call.k_states))

    def attend(
        self, lowered: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Sums, lse: Tensor
    ) -> None:
        for run in lowered.q_runs:
            if run.before is RowState.NOTHING:
                lse[run.rows] = -torch.inf
        with accumulator(out, lowered.q_runs) as sums:
            self.add_outputs(lowered, (q, k, v), scale, sums, lse)

    def attend_backward(
        self, lowered: Any, inputs: BackwardInputs, scale: float, grads: Gradients
    ) -> None:
        with (
            accumulator(grads.dq, lowered.q_runs) as dq,
            accumulator(grads.dk, lowered.k_runs) as dk,
            accumulator(grads.dv, lowered.k_runs) as dv,
        ):
            self.add_gradients(lowered, inputs, scale, (dq, dk, dv))

    def list_tiles(self, call: KernelCall, device: torch.device) -> list[Any]:
        """The parts of the call that this kernel computes one at a time."""
        tiles = []
        for q0, q1 in np.unique(call.rectangles[:, :2], axis=0).tolist():
            spans = call.rectangles[(call.rectangles[:, :2] == (q0, q1)).all(axis=1), 2:]
            columns = np.concatenate([np.arange(k0, k1) for k0, k1 in spans])
            key = call.k_coordinates[columns]
            for first in range(q0, q1, self._rows):
                rows = slice(first, min(first + self._rows, q1))
                start, end = np.moveaxis(call.ranges[rows, :, :, None], 2, 0)
                allowed = ((key >= start) & (key < end)).any(axis=1)
                arrays = (torch.from_numpy(x).to(device) for x in (columns, allowed))
                tiles.append(RowTile(rows, *arrays))
        return tiles

    def add_outputs(
        self, call: PlainCall, inputs: Three, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        """Merges the attention of all tiles into `out` and `lse`."""
        q, k, v = inputs
        for tile in call.tiles:
            for part in tile.parts((q,), (k, v)):
                attend_tile(part, inputs, scale, out, lse)

    def add_gradients(
        self, call: PlainCall, inputs: BackwardInputs, scale: float, grads: Three
    ) -> None:
        """Adds the gradients of all tiles to `grads`: dq, dk, dv."""
        q, k, v, dout, lse, delta = inputs
        by_row = (q, dout, lse.masked_fill(lse.isinf(), 0.0), delta)  # unused rows have lse +∞
        for tile in call.tiles:
            for part in tile.parts(by_row, (k, v)):
                attend_tile_backward(part, inputs, scale, grads)
