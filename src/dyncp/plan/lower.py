"""Turns placement and schedules into one independent part per rank."""

from collections.abc import Mapping

import numpy as np

from dyncp.arrays import Int64, distinct_pairs, frozen
from dyncp.blocks import BlockGraph
from dyncp.placement import Balance, Placement
from dyncp.plan.layout import Layout
from dyncp.plan.plan import Plan
from dyncp.plan.programs import TileTable, build_programs
from dyncp.plan.rank_plan import MaskPlan, OwnedBlocks, Program, RankPlan
from dyncp.plan.rows import RowRuns, build_row_runs, split_row_runs
from dyncp.schedule import Schedule

Schedules = Mapping[str, tuple[Schedule, Schedule | None]]


def lower(
    graph: BlockGraph, placement: Placement, schedules: Schedules, balance: Balance, layout: Layout
) -> Plan:
    """The whole plan. `schedules` has forward and (unless evaluating) backward per mask name.

    The parts of all ranks share the tables that they are views of."""
    blocks = OwnedBlocks(
        graph.blocks.sequence, graph.blocks.start, graph.blocks.end, placement.block_rank
    )
    local_rows = _local_rows(graph, placement, layout)
    masks = {
        name: _mask_plans(graph, placement, name, schedules[name], local_rows, layout)
        for name in graph.tiles
    }
    declared = {
        name: (_total_bytes(graph, pair[0]), _total_bytes(graph, pair[1]))
        for name, pair in schedules.items()
    }
    lengths, fingerprint = frozen(graph.batch.lengths), graph.batch.fingerprint
    parts = [
        RankPlan(
            rank=rank,
            num_ranks=placement.num_ranks,
            fingerprint=fingerprint,
            digest="",
            solver=placement.solver,
            static=placement.static,
            balance=balance,
            shape=graph.shape,
            head_groups=graph.head_groups,
            slot_alignment=layout.slot_alignment,
            local_multiple=layout.local_multiple,
            declared_bytes=declared,
            lengths=lengths,
            blocks=blocks,
            masks={name: of_ranks[rank] for name, of_ranks in masks.items()},
        )
        for rank in range(placement.num_ranks)
    ]
    return Plan.of(parts)


def _local_rows(graph: BlockGraph, placement: Placement, layout: Layout) -> Int64:
    """Rows of each rank."""
    tokens = np.bincount(placement.block_rank, graph.blocks.tokens, placement.num_ranks)
    rows = [layout.pad_local(int(held)) for held in tokens.tolist()]
    return np.asarray(rows, np.int64)


def _total_bytes(graph: BlockGraph, schedule: Schedule | None) -> int:
    if schedule is None:
        return 0
    transfers = schedule.transfers
    per_token = graph.payload_bytes[transfers.kind, transfers.head_group]
    return int((per_token * graph.blocks.tokens[transfers.block]).sum())


def _mask_plans(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    schedules: tuple[Schedule, Schedule | None],
    local_rows: Int64,
    layout: Layout,
) -> list[MaskPlan]:
    """One mask's plan for every rank."""
    tiles = TileTable.of(graph, placement, name)
    forward = build_programs(graph, tiles, schedules[0], local_rows, layout)
    backward: list[Program | None] = [None] * placement.num_ranks
    if schedules[1] is not None:
        backward = [*build_programs(graph, tiles, schedules[1], local_rows, layout)]
    runs = _row_runs(graph, name, tiles, placement.num_ranks)
    columns = (tiles.split(), runs, forward, backward)
    return [MaskPlan(*values) for values in zip(*columns, strict=True)]


def _row_runs(graph: BlockGraph, name: str, tiles: TileTable, num_ranks: int) -> list[RowRuns]:
    """Key ranges of the query blocks that each rank computes with."""
    num_blocks = len(graph.blocks)
    runs = build_row_runs([mask.ranges for mask in graph.batch.masks[name]], graph.blocks)
    rank, block, _ = distinct_pairs(tiles.rank, num_ranks, tiles.tiles.q_block, num_blocks)
    return split_row_runs(runs, num_blocks, rank, block, num_ranks)
