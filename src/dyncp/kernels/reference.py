"""Kernel `reference`: plain fp64 attention over kernel tiles. It defines what a call means."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Bool, Int32, Int64
from dyncp.kernels.accumulate import Run, accumulator, list_runs, merge_partial, open_lse
from dyncp.kernels.index_arrays import IndexArrays
from dyncp.kernels.kernel import Gradients, Kernel, KernelCall, Sums


@dataclass(frozen=True, eq=False)
class KernelTiles:
    """Listed kernel tiles, ordered, and the cut ranges. A pair is computed iff its kernel tile is
    listed and the key's coordinate lies in the query row's ranges."""

    rows: int
    columns: int
    q_tile: Int64  # [listed]
    k_tile: Int64  # [listed]
    ranges: Int32  # [query rows, R, 2], coordinates


def list_kernel_tiles(call: KernelCall, rows: int, columns: int) -> KernelTiles:
    """Short sequences share kernel tiles. Let rows 0-1 be block A and 2-3 block B of one sequence,
    kernel tiles have 4 rows, and this call has only the tile A × A:

        A x . . .     the one listed kernel tile also holds B × A and B × B, which another division
        A x x . .     or rank computes. So the ranges of every row are cut to the key blocks that
        B o o o .     its block meets in this call: rows 2-3 keep nothing, and nothing is computed
        B o o o o     twice.
    """
    q_tiles, k_tiles = (-(-len(call.q_coordinates) // rows), -(-len(call.k_coordinates) // columns))
    listed: Bool = np.zeros((q_tiles, k_tiles), np.bool_)
    for q0, q1, k0, k1 in call.rectangles:
        listed[q0 // rows : -(-q1 // rows), k0 // columns : -(-k1 // columns)] = True
    q_tile, k_tile = np.nonzero(listed)
    return KernelTiles(rows, columns, q_tile, k_tile, _cut_ranges(call))


def _cut_ranges(call: KernelCall) -> Int32:
    """Each row's ranges, cut to the key blocks that the row meets in this call."""
    pieces: list[tuple[Int64, Int32]] = []
    starts = np.unique(call.rectangles[:, :2], axis=0)
    for q0, q1 in starts:
        mine = call.rectangles[(call.rectangles[:, 0] == q0) & (call.rectangles[:, 1] == q1)]
        first = np.sort(call.k_coordinates[mine[:, 2]])
        width = (mine[:, 3] - mine[:, 2])[np.argsort(call.k_coordinates[mine[:, 2]])]
        pieces.append((np.arange(q0, q1), _intersect(call.ranges[q0:q1], first, first + width)))
    most = max((cut.shape[1] for _, cut in pieces), default=1)
    ranges = np.zeros((len(call.q_coordinates), most, 2), np.int32)
    for rows, cut in pieces:
        ranges[rows, : cut.shape[1]] = cut
    return ranges


def _intersect(ranges: Int32, first: Int64, last: Int64) -> Int32:
    """Ranges [rows, R, 2] met with the intervals [first, last): [rows, up to R × intervals, 2]."""
    joined = np.append(True, first[1:] != last[:-1])
    first, last = first[joined], last[np.append(joined[1:], True)]
    start = np.maximum(ranges[:, :, None, 0], first)
    end = np.minimum(ranges[:, :, None, 1], last)
    end = np.maximum(start, end)
    cut = np.stack([start, end], axis=-1).reshape(len(ranges), -1, 2)
    used = (cut[:, :, 1] > cut[:, :, 0]).any(axis=0)
    return cut[:, used].astype(np.int32)


@dataclass(frozen=True)
class RowTile:
    """Neighbouring query rows with the key rows that they meet."""

    rows: slice
    columns: Tensor  # key rows
    allowed: Tensor  # bool [rows, columns]

    def to(self, device: torch.device) -> "RowTile":
        return RowTile(self.rows, self.columns.to(device), self.allowed.to(device))

    def parts(self, of_rows: Iterable[Tensor], of_columns: Iterable[Tensor]) -> Iterator["RowTile"]:
        """The tile, or its single rows where some of these tensors is not finite in it."""
        finite = all(x[self.rows].isfinite().all() for x in of_rows)
        if finite and all(x[self.columns].isfinite().all() for x in of_columns):
            yield self
        else:
            yield from self.single_rows()

    def single_rows(self) -> Iterator["RowTile"]:
        """Each row with the keys that it may see: a product of 0 with NaN, or with infinity, is
        NaN, so that others must not take part."""
        for index, allowed in enumerate(self.allowed):
            if allowed.any():
                row = self.rows.start + index
                yield RowTile(slice(row, row + 1), self.columns[allowed], allowed[allowed][None])


def attend_tile(
    tile: RowTile, inputs: tuple[Tensor, Tensor, Tensor], scale: float, out: Tensor, lse: Tensor
) -> None:
    """Merges the tile's attention into the rows of `out` and `lse`."""
    q, k, v = inputs
    scores = _scores(q[tile.rows], k[tile.columns], scale, tile.allowed)
    tile_lse = scores.logsumexp(dim=-1)
    weights = _weights(scores, tile_lse)
    values = torch.einsum("hqk,khd->qhd", weights, _per_q_head(v[tile.columns], q))
    merge_partial(out[tile.rows], lse[tile.rows], values.to(out.dtype), tile_lse.T.to(lse.dtype))


def attend_tile_backward(
    tile: RowTile,
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds the tile's gradients to `grads`: dq, dk, dv."""
    (q, k, v), (dq, dk, dv) = inputs, grads
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


@dataclass(frozen=True)
class ReferenceCall:
    tiles: list[RowTile]
    q_runs: list[Run]
    k_runs: list[Run]


@dataclass(frozen=True)
class ReferenceKernel(Kernel):
    """`rows` × `columns` is the size of its kernel tiles."""

    rows: int = 128
    columns: int = 128
    name: str = "reference"
    merges: bool = True
    collects: bool = False

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> ReferenceCall:  # noqa: ARG002
        tiles = list_kernel_tiles(call, self.rows, self.columns)
        ranges = torch.from_numpy(tiles.ranges)
        k_coordinates = torch.from_numpy(call.k_coordinates)
        row_tiles = [
            self._row_tile(tiles, int(q_tile), ranges, k_coordinates)
            for q_tile in dict.fromkeys(tiles.q_tile.tolist())
        ]
        return ReferenceCall(row_tiles, list_runs(call.q_states), list_runs(call.k_states))

    def _row_tile(
        self, tiles: KernelTiles, q_tile: int, ranges: Tensor, k_coordinates: Tensor
    ) -> RowTile:
        rows = slice(q_tile * self.rows, min((q_tile + 1) * self.rows, len(ranges)))
        columns = torch.cat(
            [
                torch.arange(
                    k * self.columns,
                    min((k + 1) * self.columns, len(k_coordinates)),
                    device=ranges.device,  # not the default one
                )
                for k in tiles.k_tile[tiles.q_tile == q_tile].tolist()
            ]
        )
        key = k_coordinates[columns]
        start, end = ranges[rows, :, None, 0], ranges[rows, :, None, 1]
        allowed = ((key >= start) & (key < end)).any(dim=1)
        return RowTile(rows, columns, allowed & (key >= 0))

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
            for tile in lowered.tiles:
                for part in tile.to(q.device).parts((q,), (k, v)):
                    attend_tile(part, (q, k, v), scale, sums, lse)

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
        tiles: list[RowTile],
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        q, k, v = inputs
        of_rows = (q, dout, lse.masked_fill(lse.isinf(), 0.0), delta)  # +∞: unused rows
        for tile in tiles:
            for part in tile.to(q.device).parts(of_rows, (k, v)):
                attend_tile_backward(part, inputs, dout, lse, delta, scale, grads)
