"""Turns placement and schedules into one independent part per rank."""

from collections.abc import Mapping

import numpy as np

from dyncp.arrays import Bool, Int32, frozen
from dyncp.blocks import BlockGraph
from dyncp.placement import Balance, Placement
from dyncp.plan.instructions import order_instructions
from dyncp.plan.layout import Layout
from dyncp.plan.plan import Plan
from dyncp.plan.rank_plan import MaskPlan, Messages, OwnedBlocks, Program, RankPlan, RankTiles
from dyncp.plan.rows import RowRuns, build_row_runs
from dyncp.plan.slots import find_lifetimes, place_slots
from dyncp.schedule import Schedule

Schedules = Mapping[str, tuple[Schedule, Schedule | None]]


def lower(
    graph: BlockGraph, placement: Placement, schedules: Schedules, balance: Balance, layout: Layout
) -> Plan:
    """The whole plan. `schedules` has forward and (unless evaluating) backward per mask name."""
    blocks = OwnedBlocks(
        graph.blocks.sequence, graph.blocks.start, graph.blocks.end, placement.block_rank
    )
    rows = {
        name: build_row_runs([mask.ranges for mask in graph.batch.masks[name]], graph.blocks)
        for name in graph.tiles
    }
    declared = {
        name: (_total_bytes(graph, pair[0]), _total_bytes(graph, pair[1]))
        for name, pair in schedules.items()
    }

    def part(rank: int) -> RankPlan:
        masks = {
            name: _mask_plan(graph, placement, name, schedules[name], rows[name], rank, layout)
            for name in graph.tiles
        }
        return RankPlan(
            rank=rank,
            num_ranks=placement.num_ranks,
            fingerprint=graph.batch.fingerprint,
            digest="",
            solver=placement.solver,
            static=placement.static,
            balance=balance,
            shape=graph.shape,
            head_groups=graph.head_groups,
            slot_alignment=layout.slot_alignment,
            local_multiple=layout.local_multiple,
            declared_bytes=declared,
            lengths=frozen(graph.batch.lengths),
            blocks=blocks,
            masks=masks,
        )

    return Plan.of([part(rank) for rank in range(placement.num_ranks)])


def _total_bytes(graph: BlockGraph, schedule: Schedule | None) -> int:
    if schedule is None:
        return 0
    transfers = schedule.transfers
    per_token = graph.payload_bytes[transfers.kind, transfers.head_group]
    return int((per_token * graph.blocks.tokens[transfers.block]).sum())


def _mask_plan(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    schedules: tuple[Schedule, Schedule | None],
    rows: RowRuns,
    rank: int,
    layout: Layout,
) -> MaskPlan:
    tiles, own = graph.tiles[name], placement.tile_rank[name] == rank
    rank_tiles = RankTiles(
        frozen(tiles.q_block[own]),
        frozen(tiles.k_block[own]),
        frozen(tiles.head_group[own]),
        frozen(tiles.pairs[own], np.int64),
    )
    wanted: Bool = np.zeros(len(graph.blocks), np.bool_)
    wanted[rank_tiles.q_block] = True
    local_tokens = int(graph.blocks.tokens[placement.block_rank == rank].sum())
    local_rows = layout.pad_local(local_tokens)

    def program(schedule: Schedule) -> Program:
        return _program(graph, schedule, rank_tiles, own, rank, local_rows, layout.slot_alignment)

    forward, backward = schedules
    return MaskPlan(
        rank_tiles,
        rows.of_blocks(wanted),
        program(forward),
        None if backward is None else program(backward),
    )


def _program(
    graph: BlockGraph,
    schedule: Schedule,
    tiles: RankTiles,
    own: Bool,
    rank: int,
    local_rows: int,
    alignment: int,
) -> Program:
    moved, tile_division = schedule.transfers, frozen(schedule.tile_division[own])
    sends = _messages(schedule, moved.source == rank, moved.target)
    receives = _messages(schedule, moved.target == rank, moved.source)
    instructions = frozen(order_instructions(schedule, sends, receives, tile_division))
    spans = find_lifetimes(tiles, tile_division, instructions, sends, receives)
    slots, workspace_rows = place_slots(
        spans, graph.blocks.tokens, len(graph.head_groups), local_rows, alignment
    )
    return Program(tile_division, instructions, sends, receives, slots, workspace_rows)


def _messages(schedule: Schedule, chosen: Bool, peer: Int32) -> Messages:
    moved = schedule.transfers
    columns = (moved.phase, peer, moved.kind, moved.head_group, moved.block)
    return Messages(*(frozen(column[chosen]) for column in columns))
