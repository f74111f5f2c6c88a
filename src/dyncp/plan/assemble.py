"""Assembles a plan, with one independent part per rank, from a placement and its schedules.

The parts of all ranks are built together: a column holds the values of rank 0, then of rank 1, and
so on, and each part has views of these columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from dyncp.arrays import (
    Bool,
    Columns,
    Int32,
    Int64,
    bounds_of_ranks,
    distinct_pairs,
    frozen,
    ranges_of,
    sorted_order,
    split_by_rank,
    starts_of,
)
from dyncp.blocks import (
    DEFAULT_MASK,
    IS_INPUT,
    OF_KEYS,
    AttentionShape,
    Batch,
    BlockGraph,
    Direction,
    Tiles,
    build_graph,
)
from dyncp.compiled import compiled, inner
from dyncp.masks import Mask, find_stretches, single_stretches
from dyncp.masks.positions import NOTHING
from dyncp.placement import Balance, Limits, Placement, Traffic, measure_balance
from dyncp.plan.format import (
    COMPUTE,
    LAUNCH,
    WAIT,
    Layout,
    MaskPlan,
    Messages,
    Op,
    OwnedBlocks,
    Program,
    RankPlan,
    RowRuns,
    Space,
    Stretches,
    build_row_runs,
    pad_rows,
)
from dyncp.plan.plan import Plan
from dyncp.plan.slots import BlockUses, build_slots
from dyncp.schedule import Schedule, build_schedule

Schedules = Mapping[str, tuple[Schedule, Schedule | None]]
Table = TypeVar("Table", bound=Columns)


def assemble_plan(
    graph: BlockGraph,
    placement: Placement,
    schedules: Schedules,
    balance: Balance,
    layout: Layout,
    reasons: str = "",
) -> Plan:
    """Builds the plan of all ranks. `schedules` has, by mask name, the forward and the backward
    schedule (None in plans for evaluation); `reasons` explains the choice."""
    blocks = OwnedBlocks(
        graph.blocks.sequence, graph.blocks.start, graph.blocks.end, placement.block_rank
    )
    tokens = np.bincount(placement.block_rank, graph.blocks.tokens, placement.num_ranks)
    local_rows = pad_rows(tokens.astype(np.int64), layout.local_multiple)
    masks = {
        name: _mask_plans(graph, placement, name, schedules[name], local_rows, layout)
        for name in graph.tiles
    }
    declared = {
        name: (_total_bytes(graph, forward), _total_bytes(graph, backward))
        for name, (forward, backward) in schedules.items()
    }
    lengths, fingerprint = frozen(graph.batch.lengths), graph.batch.fingerprint
    stretches = stretches_of(graph.batch)
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
            stretches=stretches,
            masks={name: of_ranks[rank] for name, of_ranks in masks.items()},
        )
        for rank in range(placement.num_ranks)
    ]
    return Plan.of(parts, reasons)


def stretches_of(batch: Batch) -> Stretches:
    """The stretches of all sequences of the batch, in batch order."""
    single = np.any([single_stretches(runs) for runs in batch.runs.values()], axis=0)
    found = [(np.zeros(1, np.int64), np.full(1, NOTHING))] * len(single)
    for sequence in np.flatnonzero(~single).tolist():
        found[sequence] = find_stretches([own[sequence] for own in batch.masks.values()])
    start, before = (np.concatenate(own) for own in zip(*found, strict=True))
    offset = np.repeat(batch.offsets[:-1], [len(own) for own, _ in found])
    return Stretches(frozen(start + offset), frozen(np.where(before < 0, before, before + offset)))


def _total_bytes(graph: BlockGraph, schedule: Schedule | None) -> int:
    """Bytes of all transfers of a schedule."""
    if schedule is None:
        return 0
    transfers = schedule.transfers
    per_token = graph.payload_bytes[transfers.kind, transfers.head_group]
    return int((per_token * graph.blocks.tokens[transfers.block]).sum())


@dataclass(frozen=True, eq=False)
class _ByRank(Generic[Table]):
    """A table whose rows are sorted by rank: row i was row `order[i]`, and rank r has rows
    bounds[r] to bounds[r + 1]."""

    order: Int64
    rank: Int64
    bounds: Int64
    table: Table

    @staticmethod
    def of(table: Table, rank: Int32 | Int64, num_ranks: int) -> "_ByRank[Table]":
        order, bounds = sorted_order((rank, num_ranks)), bounds_of_ranks(rank, num_ranks)
        return _ByRank(order, rank[order].astype(np.int64), bounds, table.select(order))

    def split(self) -> list[Table]:
        return split_by_rank(type(self.table), self.table.columns(), self.bounds)


def _mask_plans(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    schedules: tuple[Schedule, Schedule | None],
    local_rows: Int64,
    layout: Layout,
) -> list[MaskPlan]:
    """The plan of one mask for every rank."""
    num_ranks = placement.num_ranks
    tiles = _ByRank.of(graph.tiles[name], placement.tile_rank[name], num_ranks)
    programs = (
        _programs(graph, tiles, schedule, local_rows, layout.slot_alignment)
        if schedule is not None
        else [None] * num_ranks
        for schedule in schedules
    )
    of_ranks = (tiles.split(), _row_runs(graph, name, tiles, num_ranks), *programs)
    return [MaskPlan(*values) for values in zip(*of_ranks, strict=True)]


def _row_runs(graph: BlockGraph, name: str, tiles: _ByRank[Tiles], num_ranks: int) -> list[RowRuns]:
    """Key ranges of the query blocks in each rank's tiles."""
    num_blocks = len(graph.blocks)
    runs = build_row_runs(graph.batch.runs[name], graph.blocks)
    rank, block, _ = distinct_pairs(tiles.rank, num_ranks, tiles.table.q_block, num_blocks)
    counts = np.bincount(runs.block, minlength=num_blocks)
    wanted = ranges_of(starts_of(counts)[block], counts[block])
    of_rank = starts_of(np.bincount(rank, counts[block], num_ranks).astype(np.int64))
    return split_by_rank(RowRuns, runs.select(wanted).columns(), of_rank)


def _programs(
    graph: BlockGraph, tiles: _ByRank[Tiles], schedule: Schedule, local_rows: Int64, alignment: int
) -> list[Program]:
    """The program of every rank for one mask and direction; `local_rows` is int64[ranks]."""
    num_ranks, moved = len(local_rows), schedule.transfers
    what = (moved.kind, moved.head_group, moved.block)
    sends = _ByRank.of(Messages(moved.phase, moved.target, *what), moved.source, num_ranks)
    receives = _ByRank.of(Messages(moved.phase, moved.source, *what), moved.target, num_ranks)
    division = schedule.tile_division[tiles.order]
    steps, first_step = order_instructions(
        schedule,
        (moved.source, moved.phase),
        (moved.target, moved.phase),
        _marked(tiles.rank, division, num_ranks, schedule.num_divisions),
    )
    at = _index_instructions(steps, first_step, max(schedule.num_phases, schedule.num_divisions))
    slots, workspace_rows = build_slots(
        *_block_uses(tiles, division, sends, receives, at),
        steps,
        first_step,
        graph.blocks.tokens,
        local_rows,
        len(graph.head_groups),
        alignment,
    )
    columns = (
        np.split(frozen(division), tiles.bounds[1:-1]),
        np.split(frozen(steps), first_step[1:-1]),
        sends.split(),
        receives.split(),
        slots,
        frozen(workspace_rows),
    )
    return [Program(*values) for values in zip(*columns, strict=True)]


def _block_uses(
    tiles: _ByRank[Tiles],
    division: Int32,
    sends: _ByRank[Messages],
    receives: _ByRank[Messages],
    at: Int64,
) -> tuple[BlockUses, list[BlockUses]]:
    """Blocks that are received as inputs, and all uses of blocks by tiles and sends. `at` comes
    from `_index_instructions`."""
    read, sent, inputs = tiles.table, sends.table, IS_INPUT[receives.table.kind]
    rank, got = receives.rank[inputs], receives.table.select(inputs)
    computed = at[Op.COMPUTE, tiles.rank, division]
    launched = at[Op.LAUNCH, sends.rank, sent.phase]
    uses = [
        BlockUses(tiles.rank, Space.Q, read.q_block, read.head_group, computed),
        BlockUses(tiles.rank, Space.KV, read.k_block, read.head_group, computed),
        BlockUses(sends.rank, OF_KEYS[sent.kind], sent.block, sent.head_group, launched),
    ]
    waited = at[Op.WAIT, rank, got.phase]
    return BlockUses(rank, OF_KEYS[got.kind], got.block, got.head_group, waited), uses


Column = Int32 | Int64


def order_instructions(
    schedule: Schedule,
    sends: tuple[Column, Column],
    receives: tuple[Column, Column],
    computes: Bool,
) -> tuple[Int64, Int64]:
    """Instructions (op, argument) of all ranks, sorted by rank, and int64[ranks + 1] where those of
    each rank start. The simulator runs the same order before a plan is assembled.

    Every phase is launched as early as the schedule allows and waited for as late as it allows.
    `sends` and `receives` are (rank, phase) of every message, `computes` is bool[ranks, divisions].
    """
    size, feeds = (len(computes), schedule.num_phases), schedule.phase_feeds
    receiving = _marked(*receives, *size)
    return _order(
        _marked(*sends, *size) | receiving,
        receiving,
        computes,
        schedule.phase_after_division,
        schedule.phase_after_phase.astype(np.int64),
        feeds,
        np.argsort(feeds, kind="stable"),
    )


def _marked(rank: Column, number: Column, num_ranks: int, num_numbers: int) -> Bool:
    """bool[ranks, numbers]: True for each of these (rank, number)."""
    marked: Bool = np.zeros((num_ranks, num_numbers), np.bool_)
    marked[rank, number] = True
    return marked


def _index_instructions(steps: Int64, first: Int64, width: int) -> Int64:
    """Index of each instruction in its rank's program, int64[ops, ranks, arguments below width]; -1
    if a rank has no such instruction."""
    counts = np.diff(first)
    rank = np.repeat(np.arange(len(counts)), counts)
    at = np.full((len(Op), len(counts), width), -1, np.int64)
    at[steps[:, 0], rank, steps[:, 1]] = np.arange(len(steps)) - first[rank]
    return at


@compiled
def _order(
    takes_part: Bool,
    waiting: Bool,
    computes: Bool,
    after_division: Int32,
    after_phase: Int64,
    feeds: Int32,
    by_feeds: Int64,
) -> tuple[Int64, Int64]:
    """Implements `order_instructions`. `waiting` marks phases that a rank receives and has not
    waited for yet; it is modified."""
    num_ranks, num_phases = takes_part.shape
    num_divisions = computes.shape[1]
    total = takes_part.sum() + waiting.sum() + computes.sum()
    steps, first = np.empty((total, 2), np.int64), np.zeros(num_ranks + 1, np.int64)
    count = first[0]
    for rank in range(num_ranks):
        done = fed = 0  # number of divisions, and of phases sorted by the division they feed
        for phase in range(num_phases + 1):  # num_phases means the end of the program
            at_end = phase == num_phases
            if not at_end and not takes_part[rank, phase]:
                continue
            until = num_divisions if at_end else min(after_division[phase], num_divisions - 1)
            while done <= until:
                # Ranks without tiles wait as well: they may relay blocks in later phases.
                while fed < num_phases and feeds[by_feeds[fed]] <= done:
                    count = _wait(steps, count, waiting, rank, by_feeds[fed])
                    fed += 1
                if done < num_divisions and computes[rank, done]:
                    steps[count, 0], steps[count, 1] = COMPUTE, done
                    count += 1
                done += 1
            if not at_end:
                count = _wait(steps, count, waiting, rank, after_phase[phase])
                steps[count, 0], steps[count, 1] = LAUNCH, phase
                count += 1
        first[rank + 1] = count
    return steps, first


@inner
def _wait(steps: Int64, count: int, waiting: Bool, rank: int, phase: int) -> int:
    if phase >= 0 and waiting[rank, phase]:
        steps[count, 0], steps[count, 1] = WAIT, phase
        waiting[rank, phase] = False
        count += 1
    return count


SAMPLE_DIVISIONS = 3


def sample_plan(
    masks: Sequence[Mask],
    num_ranks: int,
    shape: AttentionShape,
    block_size: int,
    head_groups: int = 1,
) -> Plan:
    """A small plan to test an executor with. Blocks and tiles are assigned to ranks round robin, so
    that queries, keys and results are all sent. On one rank, all tiles are one kernel call."""
    graph = build_graph(Batch.of(masks), shape, [block_size] * len(masks), head_groups)
    tiles = graph.tiles[DEFAULT_MASK]
    tile_rank = (tiles.q_block + tiles.k_block) % num_ranks
    placement = Placement(
        num_ranks,
        frozen(np.arange(len(graph.blocks)) % num_ranks),
        {DEFAULT_MASK: frozen(tile_rank)},
        "sample",
        static=False,
    )
    return _plan_sample(graph, placement)


def sample_ring(
    masks: Sequence[Mask], num_ranks: int, shape: AttentionShape, block_size: int
) -> Plan:
    """Another small plan: keys and values are passed around a ring, with a kernel call at every
    hop, so that slots are reused and results are passed on and added to."""
    graph = build_graph(Batch.of(masks), shape, [block_size] * len(masks))
    owner = np.arange(len(graph.blocks)) % num_ranks
    ring = np.zeros((len(owner), 1), np.int32)
    traffic = Traffic("ring", (tuple(range(num_ranks)),), frozen(ring), frozen(owner[:, None]))
    placement = Placement.where_queries_live(
        graph, num_ranks, owner, "sample_ring", static=True, traffic=traffic
    )
    return _plan_sample(graph, placement)


def _plan_sample(graph: BlockGraph, placement: Placement) -> Plan:
    forward, backward = (
        build_schedule(graph, placement, DEFAULT_MASK, direction, SAMPLE_DIVISIONS)
        for direction in Direction
    )
    balance = measure_balance(graph, placement, Limits())
    return assemble_plan(graph, placement, {DEFAULT_MASK: (forward, backward)}, balance, Layout())
