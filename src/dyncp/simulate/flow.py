"""Flow: what all ranks do in one direction of one attention layer, from a schedule or a plan."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int64, starts_of
from dyncp.blocks import BlockGraph, Direction, Tiles, bytes_per_token
from dyncp.cost import CostModel
from dyncp.placement import Placement
from dyncp.plan import Op, Plan
from dyncp.plan.assemble import order_instructions
from dyncp.schedule import Schedule
from dyncp.simulate.layer import Layer, RowCosts, Sent, count_row_bytes, more_seconds
from dyncp.simulate.own_code import price_own_code

# If row work is priced, programs begin with START (copies in) and end with END (merges, copies
# out).
START, END = len(Op), len(Op) + 1


class Programs(NamedTuple):
    """Instructions of all ranks; rank r has the instructions `first[r]` to `first[r + 1]`."""

    op: Int64
    argument: Int64
    first: Int64

    @property
    def rank(self) -> Int64:
        """Rank of every instruction."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))


class FlowMessages(NamedTuple):
    """One message of `size` bytes for all payloads of a phase, source and target.

    Messages are ordered by phase, distance from source to target, and source. In a queue, the
    message with the smaller number goes first. So, in every phase, a rank serves its neighbours
    first, and ranks do not all send to the same one.
    """

    phase: Int64
    source: Int64
    target: Int64
    size: Float64


class Flow(NamedTuple):
    """The input of the simulator. `work` has the seconds of every instruction on a rank of speed 1:
    packing (LAUNCH), unpacking (WAIT), computing, and row work at START and END. `tile_seconds` is
    the sum over all tiles, without call overhead. The host has issued an instruction `issued`
    seconds after the call. While a rank sends or receives, its computation takes `slowdown` times
    longer."""

    num_ranks: int
    num_phases: int
    programs: Programs
    work: Float64
    messages: FlowMessages
    tile_seconds: float
    issued: Float64
    slowdown: float = 1.0

    @property
    def call_seconds(self) -> Float64:
        """Seconds of every rank's call if it never waited for messages or for the host."""
        total = np.bincount(self.programs.rank, self.work, self.num_ranks)
        return total.astype(np.float64)

    def with_compute(self, seconds: Float64) -> "Flow":
        """The flow with these seconds of computation, float64[ranks, divisions]."""
        chosen, work = self.programs.op == Op.COMPUTE, self.work.copy()
        work[chosen] = seconds[self.programs.rank[chosen], self.programs.argument[chosen]]
        return self._replace(work=work)


def flow_of_schedule(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    schedule: Schedule,
    direction: Direction,
    cost: CostModel,
) -> Flow:
    """Flow of mask `name` in one direction, before a plan is assembled."""
    moved, num_divisions = schedule.transfers, schedule.num_divisions
    groups = cost.groups_for(graph.shape, graph.head_groups)
    tokens = graph.blocks.tokens.astype(np.int64)
    columns = (moved.phase, moved.source, moved.target, moved.kind, moved.head_group, moved.block)
    layer = Layer(
        direction,
        placement.num_ranks,
        num_divisions,
        schedule.num_phases,
        groups,
        tokens,
        placement.block_rank.astype(np.int64),
        graph.blocks.sequence.astype(np.int64),
        graph.tiles[name],
        placement.tile_rank[name].astype(np.int64) * num_divisions + schedule.tile_division,
        cost.graph_tile_seconds(graph, name, direction),
        _sized(columns, tokens, bytes_per_token(cost.shape, groups)),
    )
    messages = _join_messages(layer)
    sends, receives = (messages.source, messages.phase), (messages.target, messages.phase)
    steps, first = order_instructions(schedule, sends, receives, layer.calls.sum(axis=2) > 0)
    programs = Programs(steps[:, 0].copy(), steps[:, 1].copy(), first)
    return _make_flow(layer, programs, messages, cost)


def flow_of_plan(plan: Plan, name: str, direction: Direction, cost: CostModel) -> Flow:
    """Flow of mask `name` in one direction."""
    layer, programs = layer_of_plan(plan, name, direction, cost)
    return _make_flow(layer, programs, _join_messages(layer), cost)


def layer_of_plan(
    plan: Plan, name: str, direction: Direction, cost: CostModel
) -> tuple[Layer, Programs]:
    part, masks = plan.parts[0], [part.mask_plan(name) for part in plan.parts]
    running = [mask.program(direction) for mask in masks]
    groups, tokens = cost.groups_for(part.shape, part.head_groups), part.blocks.tokens

    def of_tiles(column: str) -> Any:
        return _joined([getattr(mask.tiles, column) for mask in masks])

    def of_sends(column: str) -> Int64:
        return _joined([getattr(program.sends, column) for program in running])

    tiles = Tiles(*map(of_tiles, ("q_block", "k_block", "head_group", "pairs")))
    ranks, division = np.arange(plan.num_ranks), _joined([p.tile_division for p in running])
    num_divisions = int(division.max(initial=0)) + 1
    source = np.repeat(ranks, [len(p.sends) for p in running])
    phase, *others = map(of_sends, ("phase", "peer", "kind", "head_group", "block"))
    steps = _joined([p.instructions for p in running])
    bounds = starts_of(np.asarray([len(p.instructions) for p in running]))
    programs = Programs(steps[:, 0].copy(), steps[:, 1].copy(), bounds)
    rows, keys = tokens[tiles.q_block], tokens[tiles.k_block]
    heads = cost.heads_of(groups)[tiles.head_group]
    layer = Layer(
        direction,
        plan.num_ranks,
        num_divisions,
        _count_phases(programs, phase),
        groups,
        tokens.astype(np.int64),
        part.blocks.owner.astype(np.int64),
        part.blocks.sequence.astype(np.int64),
        tiles,
        np.repeat(ranks, [len(mask.tiles) for mask in masks]) * num_divisions + division,
        cost.tile_seconds(tiles.pairs, rows, keys, heads, direction),
        _sized((phase, source, *others), tokens, bytes_per_token(cost.shape, groups)),
    )
    return layer, programs


def _joined(columns: Sequence[Any]) -> Int64:
    return np.concatenate(columns).astype(np.int64)


def _sized(columns: Sequence[Any], tokens: Any, per_token: Int64) -> Sent:
    phase, source, target, kind, group, block = (column.astype(np.int64) for column in columns)
    return Sent(phase, source, target, kind, group, block, per_token[kind, group] * tokens[block])


def _count_phases(programs: Programs, sent_phase: Int64) -> int:
    """Number of phases in messages and programs. Raises ValueError if a rank launches a phase
    twice, which the compiled event loop does not check."""
    launches = programs.op == Op.LAUNCH
    launched = np.stack([programs.rank[launches], programs.argument[launches]])
    if len(np.unique(launched, axis=1).T) < launches.sum():
        raise ValueError("a rank of the plan launches a phase twice; dyncp.verify says where")
    arguments = programs.argument[programs.op != Op.COMPUTE]
    return 1 + max(int(sent_phase.max(initial=-1)), int(arguments.max(initial=-1)))


def _join_messages(layer: Layer) -> FlowMessages:
    """Joins all payloads of a phase, source and target to one message."""
    sent, num_ranks = layer.sent, layer.num_ranks
    distance = (sent.target - sent.source) % num_ranks
    key = (sent.phase * num_ranks + distance) * num_ranks + sent.source
    key, size = _sum_runs(key, sent.size)  # payloads of one message are mostly adjacent
    order = np.argsort(key)
    key, size = _sum_runs(key[order], size[order])
    source, target = key % num_ranks, (key + key // num_ranks) % num_ranks
    return FlowMessages(key // num_ranks**2, source, target, size.astype(np.float64))


def _sum_runs(key: Int64, size: Int64) -> tuple[Int64, Int64]:
    """Sums adjacent entries with the same key: keys 4 4 7 and sizes 1 2 3 give 4 7 and 3 3."""
    first = np.flatnonzero(np.diff(key, prepend=-1))
    return key[first], np.add.reduceat(size, first) if len(first) else size


def _make_flow(layer: Layer, programs: Programs, messages: FlowMessages, cost: CostModel) -> Flow:
    if cost.implementation is not None:
        work, host = price_own_code(layer, programs.op, programs.rank, programs.argument, cost)
        issued = np.append(0.0, np.cumsum(host))
        issued = issued[1:] - issued[programs.first[programs.rank]]
        tiles, slowdown = float(layer.tile_seconds.sum()), cost.profile.overlap_slowdown
        ranks, phases = layer.num_ranks, layer.num_phases
        return Flow(ranks, phases, programs, work, messages, tiles, issued, slowdown)
    calls, tile_seconds = layer.calls.sum(axis=2), layer.by_division(layer.cell, layer.tile_seconds)
    seconds = tile_seconds + cost.profile.call_seconds * calls
    seconds += cost.profile.launch_seconds * calls
    if cost.knows_rows(layer.direction):
        seconds += more_seconds(layer, cost)
    if cost.knows_launches:
        programs = _with_ends(programs)
        rows = count_row_bytes(layer, cost).seconds(cost)
    else:  # only packing and unpacking of messages
        sent, nothing = layer.sent, np.zeros(layer.num_ranks)
        packed, unpacked = (
            layer.by_phase(sent, end, sent.size) / cost.profile.copy
            for end in (sent.source, sent.target)
        )
        rows = RowCosts(nothing, packed, unpacked, nothing)
    by_op = {
        Op.LAUNCH: rows.launch,
        Op.WAIT: rows.wait,
        Op.COMPUTE: seconds,
        START: rows.start[:, None],
        END: rows.end[:, None],
    }
    rank, work = programs.rank, np.zeros(len(programs.op))
    for op, table in by_op.items():
        chosen = programs.op == op
        work[chosen] = table[rank[chosen], programs.argument[chosen]]
    return Flow(
        layer.num_ranks,
        layer.num_phases,
        programs,
        work,
        messages,
        float(tile_seconds.sum()),
        np.asarray(cost.host_seconds * (1 + np.arange(len(work)) - programs.first[rank])),
        cost.profile.overlap_slowdown,
    )


def _with_ends(programs: Programs) -> Programs:
    """Adds START at the beginning and END at the end of every program."""
    first, last = programs.first[:-1], programs.first[1:]
    around = np.stack([first, last], axis=1).reshape(-1)  # 0 3 3 7 for programs of 3 and 4
    op = np.insert(programs.op, around, [START, END] * len(first))
    argument = np.insert(programs.argument, around, 0)
    return Programs(op, argument, programs.first + 2 * np.arange(len(programs.first)))
