"""Kernel `reference`: plain fp64 attention over kernel tiles. It defines what a call means."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.kernels.accumulate import Run, accumulator, list_runs, open_lse
from dyncp.kernels.call import KernelCall
from dyncp.kernels.index_arrays import IndexArrays
from dyncp.kernels.kernel import Gradients, Sums
from dyncp.kernels.kernel_tiles import KernelTiles, list_kernel_tiles
from dyncp.kernels.row_tiles import RowTile, attend_tile, attend_tile_backward


@dataclass(frozen=True)
class ReferenceCall:
    tiles: list[RowTile]
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
    ) -> RowTile:
        rows = slice(q_tile * self.rows, min((q_tile + 1) * self.rows, len(ranges)))
        columns = torch.cat(
            [
                torch.arange(
                    k * self.columns,
                    min((k + 1) * self.columns, len(k_coordinates)),
                    device=ranges.device,
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
                for part in tile.parts((q,), (k, v)):
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
            for part in tile.parts(of_rows, (k, v)):
                attend_tile_backward(part, inputs, dout, lse, delta, scale, grads)
