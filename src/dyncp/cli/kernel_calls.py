"""Invariant 6 of a plan: the kernel calls that the executor derives from it. Needs torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dyncp.blocks import Batch
from dyncp.plan import MaskPlan, Plan, RankPlan
from dyncp.verify import ListedKernelTiles, Violation, check_kernel_call

if TYPE_CHECKING:
    from dyncp.kernels import KernelCall
    from dyncp.kernels.tile_lists import TileLists


def check_kernel_calls(plan: Plan, batch: Batch) -> list[Violation]:
    """Violations of all calls of all ranks, in the tile lists that GPU kernels run. For plans that
    keep the other invariants, and small batches: pairs are matrices."""
    found = []
    for part in plan.parts:
        for name, mask in part.masks.items():
            for call, own in kernel_calls_of(part, mask):
                tiles = (mask.tiles.q_block[own], mask.tiles.k_block[own])
                for listed in gpu_kernel_tiles(call):
                    found += check_kernel_call(batch, name, part.blocks, *tiles, listed)
    return found


def kernel_calls_of(part: RankPlan, mask: MaskPlan) -> Iterator[tuple["KernelCall", np.ndarray]]:
    """Every kernel call of a mask on a rank, with the indices of its tiles."""
    from dyncp.executor.kernel_calls import kernel_calls  # late: torch takes seconds to import

    for _, program in mask.programs():
        for division in np.unique(program.tile_division).tolist():
            for call in kernel_calls(part, mask, program, division):
                mine = program.tile_division == division
                yield call, np.flatnonzero(mine & (mask.tiles.head_group == call.head_group))


def gpu_kernel_tiles(call: "KernelCall") -> Iterator[ListedKernelTiles]:
    """The tile lists of GPU kernels: by query tiles, backward also by key tiles of half size."""
    from dyncp.kernels.tile_lists import HALF, SIDE, list_tiles_of, map_kernel_tiles

    tiles = map_kernel_tiles(call, halves=True)
    lists = [(SIDE, _entries(list_tiles_of(tiles.state, call.q_states.touched)))]
    if tiles.halves is not None and call.k_states.touched.any():
        halves = np.ascontiguousarray(tiles.halves.T)
        by_key = _entries(list_tiles_of(halves, call.k_states.touched, HALF))
        lists.append((HALF, by_key[:, [1, 0, 2]]))
    for side, entries in lists:
        yield ListedKernelTiles(
            rows=side,
            columns=side,
            q_tile=entries[:, 0],
            k_tile=entries[:, 1],
            full=entries[:, 2] > 0,
            ranges=np.moveaxis(tiles.ranges[:, :, : len(call.q_coordinates)], 2, 0),
            k_numbers=np.arange(len(call.k_coordinates)),
            q_coordinates=call.q_coordinates,
            k_coordinates=call.k_coordinates,
        )


def _entries(lists: "TileLists") -> np.ndarray:
    """[entries, 3]: a tile, one of the other side that it meets, and whether that is full."""
    entries: list[tuple[int, int, int]] = []
    for tile in lists.order.tolist():
        partial = lists.partial[tile, : lists.partial_count[tile]].tolist()
        runs = lists.runs[tile, : lists.run_count[tile]].tolist()
        entries += [(tile, other, 0) for other in partial]
        entries += [(tile, other, 1) for first, end in runs for other in range(first, end)]
    return np.array(entries, np.int64).reshape(-1, 3)
