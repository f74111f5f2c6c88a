"""Small plans to try an executor with: everything that plans can ask for, on a few rows."""

from collections.abc import Sequence

import numpy as np

from dyncp.arrays import frozen
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Batch, BlockGraph, Direction, build_graph
from dyncp.masks import Mask
from dyncp.placement import Limits, Placement, Traffic, measure_balance
from dyncp.plan.assemble import assemble_plan
from dyncp.plan.format import Layout
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
    graph = _graph(masks, shape, block_size, head_groups)
    tiles = graph.tiles[DEFAULT_MASK]
    tile_rank = (tiles.q_block + tiles.k_block) % num_ranks
    placement = Placement(
        num_ranks,
        frozen(np.arange(len(graph.blocks)) % num_ranks),
        {DEFAULT_MASK: frozen(tile_rank)},
        "sample",
        static=False,
    )
    return _plan(graph, placement)


def sample_ring(
    masks: Sequence[Mask], num_ranks: int, shape: AttentionShape, block_size: int
) -> Plan:
    """Keys and values go round a ring, with a kernel call at every hop: slots get one block after
    the other, and results are passed on and added to."""
    graph = _graph(masks, shape, block_size, 1)
    owner = np.arange(len(graph.blocks)) % num_ranks
    ring = np.zeros((len(owner), 1), np.int32)
    traffic = Traffic("ring", (tuple(range(num_ranks)),), frozen(ring), frozen(owner[:, None]))
    placement = Placement.where_queries_live(
        graph, num_ranks, owner, "sample_ring", static=True, traffic=traffic
    )
    return _plan(graph, placement)


def _graph(
    masks: Sequence[Mask], shape: AttentionShape, block_size: int, head_groups: int
) -> BlockGraph:
    batch = Batch.of(masks)
    return build_graph(batch, shape, [block_size] * len(batch.lengths), head_groups)


def _plan(graph: BlockGraph, placement: Placement) -> Plan:
    forward, backward = (
        build_schedule(graph, placement, DEFAULT_MASK, direction, DIVISIONS)
        for direction in Direction
    )
    balance = measure_balance(graph, placement, Limits())
    return assemble_plan(graph, placement, {DEFAULT_MASK: (forward, backward)}, balance, Layout())


def causal_rows(length: int) -> Mask:
    """Every row attends itself and all before it."""
    row = np.arange(length, dtype=np.int32)
    return Mask(np.stack([0 * row, row + 1], axis=1)[:, None])
