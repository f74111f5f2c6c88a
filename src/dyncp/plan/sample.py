"""Small plans to try an executor with: everything that plans can ask for, on a few rows."""

from collections.abc import Sequence

import numpy as np

from dyncp.arrays import frozen
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Batch, Direction, build_graph
from dyncp.masks import Mask
from dyncp.placement import Limits, Placement, measure_balance
from dyncp.plan.layout import Layout
from dyncp.plan.lower import lower
from dyncp.plan.plan import Plan
from dyncp.schedule import build_schedule

DIVISIONS = 3


def sample_plan(
    masks: Sequence[Mask],
    num_ranks: int,
    shape: AttentionShape,
    block_size: int,
    head_groups: int = 1,
) -> Plan:
    """Blocks go round the ranks, and so do tiles: queries, keys and results travel.

    On one rank, all tiles are one kernel call."""
    batch = Batch.of(masks)
    graph = build_graph(batch, shape, [block_size] * len(batch.lengths), head_groups)
    tiles = graph.tiles[DEFAULT_MASK]
    tile_rank = (tiles.q_block + tiles.k_block) % num_ranks
    placement = Placement(
        num_ranks,
        frozen(np.arange(len(graph.blocks)) % num_ranks),
        {DEFAULT_MASK: frozen(tile_rank)},
        "sample",
        static=False,
    )
    forward, backward = (
        build_schedule(graph, placement, DEFAULT_MASK, direction, DIVISIONS)
        for direction in Direction
    )
    schedules = {DEFAULT_MASK: (forward, backward)}
    balance = measure_balance(graph, placement, Limits())
    return lower(graph, placement, schedules, balance, Layout())


def causal_rows(length: int) -> Mask:
    """Every row attends itself and all before it."""
    row = np.arange(length, dtype=np.int32)
    return Mask(np.stack([0 * row, row + 1], axis=1)[:, None])
