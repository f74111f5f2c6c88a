"""Flow: what all ranks do in one direction of one attention layer, of a schedule or of a plan."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64, starts_of
from dyncp.blocks import BlockGraph, Direction, HeadGroup, Tiles, bytes_per_token
from dyncp.cost import CostModel
from dyncp.cost.cost_model import (
    CallBlocks,
    CallTiles,
    Moved,
    RowBytes,
    RowCosts,
    Sent,
    Touched,
    more_seconds,
)
from dyncp.placement import Placement
from dyncp.plan import Op, Plan, Program
from dyncp.plan.assemble import order_instructions
from dyncp.schedule import Schedule, Transfers

# What programs begin and end with, where row work is priced: copying in, merging and copying out.
START, END = len(Op), len(Op) + 1


class Programs(NamedTuple):
    """Instructions of all ranks; those of rank r are `first[r]` to `first[r + 1]`."""

    op: Int64
    argument: Int64
    first: Int64


class FlowMessages(NamedTuple):
    """All payloads of one phase, source and target are one message of `size` bytes.

    Ordered by phase, distance from source to target, and source: where messages queue, the smaller
    number goes first. So, in every phase, a rank serves its neighbours first, and ranks do not all
    send to the same one.
    """

    phase: Int64
    source: Int64
    target: Int64
    size: Float64


class Flow(NamedTuple):
    """`work` is the seconds of every instruction on a rank of speed 1: packing (LAUNCH), unpacking
    (WAIT), computing, and what there is to do at START and END. `tile_seconds` is that of all tiles
    together, kernel calls not included. The host needs `host_seconds` to issue an instruction;
    computing takes `slowdown` times longer while messages come in or go out."""

    num_ranks: int
    num_phases: int
    programs: Programs
    work: Float64
    messages: FlowMessages
    tile_seconds: float
    host_seconds: float = 0.0
    slowdown: float = 1.0

    @property
    def step_rank(self) -> Int64:
        """Rank of every instruction."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.programs.first))

    @property
    def call_seconds(self) -> Float64:
        """Seconds of every rank's call if it never waited, for messages or for the host."""
        total = np.bincount(self.step_rank, self.work, self.num_ranks)
        return total.astype(np.float64)


class _Layer(NamedTuple):
    """One direction of one mask on all ranks: its tiles, with place and seconds of each, and what
    travels. `tokens` and `owner` are those of the blocks, `groups` the head groups that
    the cost model's shape has."""

    num_ranks: int
    num_divisions: int
    direction: Direction
    groups: tuple[HeadGroup, ...]
    tokens: Int64
    owner: Int64
    tiles: Tiles
    cell: Int64  # rank × divisions + division of every tile
    tile_seconds: Float64
    transfers: Transfers

    def sent(self, cost: CostModel) -> Sent:
        moved = self.transfers
        size = bytes_per_token(cost.shape, self.groups)[moved.kind, moved.head_group]
        phase, source, target, kind, group, block = (
            column.astype(np.int64, copy=False)
            for column in (
                moved.phase, moved.source, moved.target, moved.kind, moved.head_group, moved.block,
            )
        )  # fmt: skip
        return Sent(phase, source, target, kind, group, block, size * self.tokens[block])

    def calls(self) -> Int64:
        """Kernel calls, one per head group, int64[ranks, divisions]."""
        groups = len(self.groups)
        called: Bool = np.zeros(self.num_ranks * self.num_divisions * groups, np.bool_)
        called[self.cell * groups + self.tiles.head_group] = True
        num_calls: Int64 = called.reshape(-1, groups).sum(axis=1, dtype=np.int64)
        return num_calls.reshape(self.num_ranks, -1)

    def seconds(self) -> Float64:
        """Of the tiles, float64[ranks, divisions]."""
        total = np.bincount(self.cell, self.tile_seconds, self.num_ranks * self.num_divisions)
        return total.astype(np.float64).reshape(self.num_ranks, -1)

    def call_tiles(self, cost: CostModel) -> CallTiles:
        tiles = self.tiles
        columns = (tiles.head_group, tiles.q_block, tiles.k_block)
        group, q_block, k_block = (column.astype(np.int64, copy=False) for column in columns)
        sides = tiles.pairs, self.tokens[q_block], self.tokens[k_block]
        heads = cost.heads_of(self.groups)[group]
        return CallTiles(self.cell, group, q_block, k_block, *sides, heads)

    def call_blocks(self, cost: CostModel) -> tuple[Float64 | None, Touched | None]:
        """Seconds that the rows of kernel calls add, and the query blocks that calls meet (None
        where they are not priced, and backward)."""
        called = self.call_tiles(cost)
        blocks, more = CallBlocks.of(called, self.direction), None
        if cost.knows_rows(self.direction):
            num_cells = self.num_ranks * self.num_divisions
            added = more_seconds(called, blocks, self.tile_seconds, num_cells, self.direction, cost)
            more = added.reshape(self.num_ranks, -1)
        forward = self.direction is Direction.FORWARD
        return more, Touched(*blocks[:3]) if forward else None

    def row_work(self, num_phases: int, cost: CostModel) -> RowCosts:
        return RowCosts(
            self.num_ranks,
            num_phases,
            self.num_divisions,
            self.tokens,
            self.owner,
            self.direction,
            RowBytes(cost.shape, self.groups),
            cost.graphs,
        )


def flow_of_schedule(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    schedule: Schedule,
    direction: Direction,
    cost: CostModel,
) -> Flow:
    """Flow of mask `name` in one direction, before a plan is assembled."""
    layer = _Layer(
        placement.num_ranks,
        schedule.num_divisions,
        direction,
        cost.groups_for(graph.shape, graph.head_groups),
        graph.blocks.tokens.astype(np.int64),
        placement.block_rank.astype(np.int64),
        graph.tiles[name],
        placement.tile_rank[name].astype(np.int64) * schedule.num_divisions
        + schedule.tile_division,
        cost.graph_tile_seconds(graph, name, direction),
        schedule.transfers,
    )

    def programs(messages: FlowMessages, calls: Int64) -> Programs:
        sends, receives = (messages.source, messages.phase), (messages.target, messages.phase)
        steps, first = order_instructions(schedule, sends, receives, calls > 0)
        return Programs(steps[:, 0].copy(), steps[:, 1].copy(), first)

    return _make_flow(layer, programs, schedule.num_phases, cost)


def flow_of_plan(plan: Plan, name: str, direction: Direction, cost: CostModel) -> Flow:
    """Flow of mask `name` in one direction."""
    programs = _programs_of_plan(plan, name, direction)
    layer = _layer_of_plan(plan, name, direction, cost)
    num_phases = _count_phases(programs, layer.transfers)
    return _make_flow(layer, lambda *_: programs, num_phases, cost)


def row_bytes_of_plan(plan: Plan, name: str, direction: Direction, cost: CostModel) -> Moved:
    """Bytes of row work at every point of every rank's program."""
    layer = _layer_of_plan(plan, name, direction, cost)
    num_phases = _count_phases(_programs_of_plan(plan, name, direction), layer.transfers)
    _, touched = layer.call_blocks(cost)
    return layer.row_work(num_phases, cost).moved(layer.sent(cost), touched)


def _layer_of_plan(plan: Plan, name: str, direction: Direction, cost: CostModel) -> _Layer:
    part, masks = plan.parts[0], [part.mask_plan(name) for part in plan.parts]
    programs = [mask.program(direction) for mask in masks]
    groups, tokens = cost.groups_for(part.shape, part.head_groups), part.blocks.tokens

    def of_tiles(column: str) -> Any:
        return np.concatenate([getattr(mask.tiles, column) for mask in masks]).astype(np.int64)

    tiles = Tiles(*map(of_tiles, ("q_block", "k_block", "head_group", "pairs")))
    division = _joined(programs, lambda p: p.tile_division)
    num_divisions = int(division.max(initial=0)) + 1
    ranks = np.arange(plan.num_ranks)
    transfers = Transfers(
        phase=_joined(programs, lambda p: p.sends.phase),
        source=np.repeat(ranks, [len(p.sends) for p in programs]),
        target=_joined(programs, lambda p: p.sends.peer),
        kind=_joined(programs, lambda p: p.sends.kind),
        head_group=_joined(programs, lambda p: p.sends.head_group),
        block=_joined(programs, lambda p: p.sends.block),
    )
    rows, keys = tokens[tiles.q_block], tokens[tiles.k_block]
    heads = cost.heads_of(groups)[tiles.head_group]
    return _Layer(
        plan.num_ranks,
        num_divisions,
        direction,
        groups,
        tokens.astype(np.int64),
        part.blocks.owner.astype(np.int64),
        tiles,
        np.repeat(ranks, [len(mask.tiles) for mask in masks]) * num_divisions + division,
        cost.tile_seconds(tiles.pairs, rows, keys, heads, direction),
        transfers,
    )


def _joined(programs: Sequence[Program], column: Callable[[Program], Any]) -> Any:
    return np.concatenate([column(program) for program in programs]).astype(np.int64)


def _programs_of_plan(plan: Plan, name: str, direction: Direction) -> Programs:
    programs = [part.mask_plan(name).program(direction) for part in plan.parts]
    return Programs(
        _joined(programs, lambda p: p.instructions[:, 0]),
        _joined(programs, lambda p: p.instructions[:, 1]),
        starts_of(np.asarray([len(p.instructions) for p in programs])),
    )


def _count_phases(programs: Programs, transfers: Transfers) -> int:
    """Phases of messages and programs. Compiled code does not check: a rank launches each once."""
    rank = np.repeat(np.arange(len(programs.first) - 1), np.diff(programs.first))
    launches = programs.op == Op.LAUNCH
    launched = np.stack([rank[launches], programs.argument[launches]])
    if len(np.unique(launched, axis=1).T) < launches.sum():
        raise ValueError("a rank of the plan launches a phase twice; dyncp.verify says where")
    arguments = programs.argument[programs.op != Op.COMPUTE]
    return 1 + max(int(transfers.phase.max(initial=-1)), int(arguments.max(initial=-1)))


def _join_messages(payloads: Sent, num_ranks: int) -> FlowMessages:
    """One message for the payloads of a phase, source and target."""
    distance = (payloads.target - payloads.source) % num_ranks
    key = (payloads.phase * num_ranks + distance) * num_ranks + payloads.source
    key, size = _sum_runs(key, payloads.size)  # schedules and plans list them side by side
    order = np.argsort(key)
    key, size = _sum_runs(key[order], size[order])
    source, target = key % num_ranks, (key + key // num_ranks) % num_ranks
    return FlowMessages(key // num_ranks**2, source, target, size.astype(np.float64))


def _sum_runs(key: Int64, size: Int64) -> tuple[Int64, Int64]:
    """Adds up neighbours with the same key: keys 4 4 7, sizes 1 2 3 give 4 7 and 3 3."""
    first = np.flatnonzero(np.diff(key, prepend=-1))
    return key[first], np.add.reduceat(size, first) if len(first) else size


def _make_flow(
    layer: _Layer,
    make_programs: Callable[[FlowMessages, Int64], Programs],
    num_phases: int,
    cost: CostModel,
) -> Flow:
    sent, calls, tile_seconds = layer.sent(cost), layer.calls(), layer.seconds()
    messages = _join_messages(sent, layer.num_ranks)
    programs, more, touched = make_programs(messages, calls), None, None
    if cost.knows_rows(layer.direction) or cost.knows_launches:
        more, touched = layer.call_blocks(cost)
    if cost.knows_launches:
        programs = _with_ends(programs)
    seconds = tile_seconds + cost.call_seconds(calls)
    seconds += cost.profile.launch_seconds * calls
    if more is not None:
        seconds += more
    rows = _row_seconds(layer.row_work(num_phases, cost), sent, touched, cost)
    by_op = {
        Op.LAUNCH: rows.launch,
        Op.WAIT: rows.wait,
        Op.COMPUTE: seconds,
        START: rows.start[:, None],
        END: rows.end[:, None],
    }
    rank = np.repeat(np.arange(layer.num_ranks), np.diff(programs.first))
    work = np.zeros(len(rank))
    for op, table in by_op.items():
        chosen = programs.op == op
        work[chosen] = table[rank[chosen], programs.argument[chosen]]
    total, slowdown = float(tile_seconds.sum()), cost.profile.overlap_slowdown
    host = cost.host_seconds
    return Flow(layer.num_ranks, num_phases, programs, work, messages, total, host, slowdown)


def _row_seconds(rows: RowCosts, sent: Sent, touched: Touched | None, cost: CostModel) -> Moved:
    """Seconds of row work at every point; where the profile knows no launches, those of packing and
    unpacking messages alone."""
    if cost.knows_launches:
        return rows.moved(sent, touched).seconds(cost)
    nothing = np.zeros(rows.num_ranks)
    launch, wait = (
        cost.copy_seconds(rows.by_phase(end, sent, sent.size)) for end in (sent.source, sent.target)
    )
    return Moved(nothing, launch, wait, nothing)


def _with_ends(programs: Programs) -> Programs:
    """Programs that begin with START and end with END."""
    op, argument = (
        np.insert(
            np.insert(column, programs.first[1:], behind),
            programs.first[:-1] + np.arange(len(programs.first) - 1),
            before,
        )
        for column, before, behind in (
            (programs.op, START, END),
            (programs.argument, 0, 0),
        )
    )
    return Programs(op, argument, programs.first + 2 * np.arange(len(programs.first)))


def with_compute(flow: Flow, seconds: Float64) -> Flow:
    """The flow with other seconds of computation, float64[ranks, divisions]."""
    programs, rank = flow.programs, flow.step_rank
    chosen, work = programs.op == Op.COMPUTE, flow.work.copy()
    work[chosen] = seconds[rank[chosen], programs.argument[chosen]]
    return flow._replace(work=work)
