"""The flow of a schedule, before it is lowered to a plan."""

import numpy as np

from dyncp.arrays import Bool, Int64
from dyncp.blocks import BlockGraph, Direction, bytes_per_token
from dyncp.cost import CostModel
from dyncp.cost.cost_model import CallBlocks, CallTiles, more_seconds
from dyncp.cost.row_work import RowBytes, RowWork, Sent, Touched
from dyncp.placement import Placement
from dyncp.plan.instructions import order_programs
from dyncp.schedule import Schedule
from dyncp.simulate.flow import (
    Flow,
    Loads,
    Messages,
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
    programs = _programs(schedule, loads, messages, placement.num_ranks)
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


def _programs(schedule: Schedule, loads: Loads, messages: Messages, num_ranks: int) -> Programs:
    receives = _marked(messages.target, messages.phase, num_ranks, schedule.num_phases)
    sends = _marked(messages.source, messages.phase, num_ranks, schedule.num_phases)
    steps, first = order_programs(
        sends | receives,
        receives,
        loads.calls > 0,
        schedule.phase_after_division,
        schedule.phase_after_phase,
        schedule.phase_feeds,
    )
    return Programs(steps[:, 0].copy(), steps[:, 1].copy(), first)


def _marked(rank: Int64, phase: Int64, num_ranks: int, num_phases: int) -> Bool:
    marked: Bool = np.zeros((num_ranks, num_phases), np.bool_)
    marked[rank, phase] = True
    return marked
