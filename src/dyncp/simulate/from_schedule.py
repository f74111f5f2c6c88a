"""The flow of a schedule, before it is lowered to a plan."""

import numpy as np

from dyncp.blocks import BlockGraph, Direction, bytes_per_token
from dyncp.cost import CostModel
from dyncp.cost.cost_model import CallBlocks, CallTiles, more_seconds
from dyncp.cost.row_work import RowBytes, RowWork, Sent, Touched
from dyncp.placement import Placement
from dyncp.plan.assemble import order_instructions
from dyncp.schedule import Schedule
from dyncp.simulate.flow import (
    Flow,
    Loads,
    Programs,
    join_messages,
    make_flow,
    row_seconds,
)


def flow_of_schedule(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    schedule: Schedule,
    direction: Direction,
    cost: CostModel,
) -> Flow:
    """Flow of mask `name` in one direction."""
    loads = _loads(graph, placement, name, schedule, direction, cost)
    sent = _sent(graph, schedule, cost)
    messages = join_messages(sent, placement.num_ranks)
    sends, receives = (messages.source, messages.phase), (messages.target, messages.phase)
    steps, first = order_instructions(schedule, sends, receives, loads.calls > 0)
    programs = Programs(steps[:, 0].copy(), steps[:, 1].copy(), first)
    rows = RowWork(
        placement.num_ranks,
        schedule.num_phases,
        schedule.num_divisions,
        graph.blocks.tokens.astype(np.int64),
        placement.block_rank.astype(np.int64),
        direction,
        RowBytes(cost.shape, cost.groups_for(graph.shape, graph.head_groups)),
        cost.graphs,
    )
    seconds = row_seconds(rows, sent, loads.touched, cost)
    return make_flow(loads, messages, programs, seconds, cost)


def _loads(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    schedule: Schedule,
    direction: Direction,
    cost: CostModel,
) -> Loads:
    rank = placement.tile_rank[name].astype(np.int64)
    cell = rank * schedule.num_divisions + schedule.tile_division
    seconds = cost.graph_tile_seconds(graph, name, direction)
    tiles, tokens = graph.tiles[name], graph.blocks.tokens
    group = tiles.head_group.astype(np.int64)
    more = touched = None
    if cost.knows_rows(direction) or cost.knows_launches:
        q_block, k_block = (b.astype(np.int64) for b in (tiles.q_block, tiles.k_block))
        heads = cost.heads_of(cost.groups_for(graph.shape, graph.head_groups))[group]
        sides = tiles.pairs, tokens[q_block], tokens[k_block]
        called = CallTiles(cell, group, q_block, k_block, *sides, heads)
        blocks = CallBlocks.of(called, direction)
        num_cells = placement.num_ranks * schedule.num_divisions
        if cost.knows_rows(direction):
            more = more_seconds(called, blocks, seconds, num_cells, direction, cost)
        if direction is Direction.FORWARD:
            touched = Touched(*blocks[:3])
    ranks, divisions = placement.num_ranks, schedule.num_divisions
    return Loads.of(cell, group, seconds, ranks, divisions, more, touched)


def _sent(graph: BlockGraph, schedule: Schedule, cost: CostModel) -> Sent:
    moved = schedule.transfers
    groups = cost.groups_for(graph.shape, graph.head_groups)
    per_token = bytes_per_token(cost.shape, groups)[moved.kind, moved.head_group]
    phase, source, target, kind, group, block = (
        column.astype(np.int64)
        for column in (
            moved.phase, moved.source, moved.target, moved.kind, moved.head_group, moved.block,
        )
    )  # fmt: skip
    size = per_token * graph.blocks.tokens[moved.block]
    return Sent(phase, source, target, kind, group, block, size)
