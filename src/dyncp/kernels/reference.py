"""Kernel `reference`: plain fp64 attention over kernel tiles. It defines what a call means."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.kernels.accumulate import Run, accumulator, list_runs, open_lse
from dyncp.kernels.call import KernelCall
from dyncp.kernels.index_arrays import IndexArrays
from dyncp.kernels.kernel import Gradients, Sums
from dyncp.kernels.kernel_tiles import KernelTiles, list_kernel_tiles
from dyncp.kernels.merge import merge_partial


@dataclass(frozen=True)
class _RowTile:
    """One kernel tile of query rows with all its listed key columns."""

    rows: slice
    columns: Tensor  # key rows
    allowed: Tensor  # bool [rows, columns]


@dataclass(frozen=True)
class ReferenceCall:
    tiles: list[_RowTile]
    q_runs: list[Run]
    k_runs: list[Run]


@dataclass(frozen=True)
class ReferenceKernel:
    """`rows` × `columns` is the size of its kernel tiles."""

    rows: int = 128
    columns: int = 128
    name: str = "reference"
    merges: bool = True
    collects: bool = False

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> ReferenceCall:  # noqa: ARG002
        tiles = list_kernel_tiles(call, self.rows, self.columns)
        ranges = torch.from_numpy(tiles.ranges).to(arrays.device)
        k_coordinates = torch.from_numpy(call.k_coordinates).to(arrays.device)
        row_tiles = [
            self._row_tile(tiles, int(q_tile), ranges, k_coordinates)
            for q_tile in dict.fromkeys(tiles.q_tile.tolist())
        ]
        return ReferenceCall(row_tiles, list_runs(call.q_states), list_runs(call.k_states))

    def _row_tile(
        self, tiles: KernelTiles, q_tile: int, ranges: Tensor, k_coordinates: Tensor
    ) -> _RowTile:
        rows = slice(q_tile * self.rows, min((q_tile + 1) * self.rows, len(ranges)))
        columns = torch.cat(
            [
                torch.arange(k * self.columns, min((k + 1) * self.columns, len(k_coordinates)))
                for k in tiles.k_tile[tiles.q_tile == q_tile].tolist()
            ]
        ).to(ranges.device)
        key = k_coordinates[columns]
        start, end = ranges[rows, :, None, 0], ranges[rows, :, None, 1]
        allowed = ((key >= start) & (key < end)).any(dim=1)
        return _RowTile(rows, columns, allowed & (key >= 0))

    def attend(
        self,
        lowered: ReferenceCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out: Sums,
        lse: Tensor,
    ) -> None:
        open_lse(lse, lowered.q_runs)
        with accumulator(out, lowered.q_runs) as sums:
            self._attend(lowered.tiles, (q, k, v), scale, sums, lse)

    def _attend(
        self,
        tiles: list[_RowTile],
        inputs: tuple[Tensor, Tensor, Tensor],
        scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        q, k, v = inputs
        for tile in tiles:
            scores = _scores(q[tile.rows], k[tile.columns], scale, tile.allowed)
            tile_lse = scores.logsumexp(dim=-1)
            weights = _weights(scores, tile_lse)
            values = torch.einsum("hqk,khd->qhd", weights, _per_q_head(v[tile.columns], q))
            merge_partial(
                out[tile.rows], lse[tile.rows], values.to(out.dtype), tile_lse.T.to(lse.dtype)
            )

    def attend_backward(
        self,
        lowered: ReferenceCall,
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: Gradients,
    ) -> None:
        with (
            accumulator(grads.dq, lowered.q_runs) as dq,
            accumulator(grads.dk, lowered.k_runs) as dk,
            accumulator(grads.dv, lowered.k_runs) as dv,
        ):
            self._attend_backward(lowered.tiles, inputs, dout, lse, delta, scale, (dq, dk, dv))

    def _attend_backward(
        self,
        tiles: list[_RowTile],
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        (q, k, v), (dq, dk, dv) = inputs, grads
        for tile in tiles:
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
    """exp(scores − lse), and 0 in rows that attend nothing (lse −∞)."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


def _per_q_head(kv: Tensor, q: Tensor) -> Tensor:
    """[rows, kv heads, dim] in fp64, each kv head repeated for the q heads it serves."""
    return kv.double().repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _per_kv_head(grad: Tensor, kv: Tensor) -> Tensor:
    """Sums the gradients of the q heads that share a kv head."""
    _, kv_heads, dim = kv.shape
    return grad.view(len(grad), kv_heads, -1, dim).sum(dim=2)
