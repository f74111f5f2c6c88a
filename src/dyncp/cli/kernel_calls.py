"""Invariant 6 of a plan: the kernel calls that the executor derives from it. Needs torch."""

from collections.abc import Iterator

import numpy as np

from dyncp.blocks import Batch
from dyncp.plan import MaskPlan, Plan, RankPlan
from dyncp.verify import ListedKernelTiles, Violation, check_kernel_call


def check_kernel_calls(plan: Plan, batch: Batch) -> list[Violation]:
    """Violations of all calls of all ranks, with kernel tiles as high and wide as the plan aligns
    its slots. For plans that keep the other invariants, and small batches: pairs are matrices."""
    found = []
    for part in plan.parts:
        for name, mask in part.masks.items():
            for listed, own in _calls(part, mask):
                tiles = (mask.tiles.q_block[own], mask.tiles.k_block[own])
                found += check_kernel_call(batch, name, part.blocks, *tiles, listed)
    return found


def _calls(part: RankPlan, mask: MaskPlan) -> Iterator[tuple[ListedKernelTiles, np.ndarray]]:
    """Every kernel call of a mask on a rank, with the indices of its tiles."""
    from dyncp.executor.kernel_calls import kernel_calls  # late: torch takes seconds to import
    from dyncp.kernels import list_kernel_tiles

    side = part.slot_alignment
    for program in (mask.forward, mask.backward):
        if program is None:
            continue
        for division in np.unique(program.tile_division).tolist():
            for call in kernel_calls(part, mask, program, division):
                tiles = list_kernel_tiles(call, side, side)
                listed = (side, side, tiles.q_tile, tiles.k_tile, tiles.ranges)
                own = (program.tile_division == division) & (
                    mask.tiles.head_group == call.head_group
                )
                yield (
                    ListedKernelTiles(*listed, call.q_coordinates, call.k_coordinates),
                    np.flatnonzero(own),
                )
