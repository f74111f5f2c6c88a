"""The flow of a plan, from the parts of all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dyncp.arrays import Int64, starts_of
from dyncp.blocks import Direction, bytes_per_token
from dyncp.cost import CostModel
from dyncp.cost.cost_model import CallBlocks, CallTiles, more_seconds
from dyncp.cost.row_work import Moved, RowBytes, RowWork, Sent, Touched
from dyncp.plan import Op, Plan, Program, RankPlan
from dyncp.simulate.flow import Flow, Loads, Programs, join_messages, make_flow, row_seconds


def flow_of_plan(plan: Plan, name: str, direction: Direction, cost: CostModel) -> Flow:
    """Flow of mask `name` in one direction."""
    programs = [part.mask_plan(name).program(direction) for part in plan.parts]
    sent = _sent(plan.parts[0], programs, cost)
    messages = join_messages(sent, plan.num_ranks)
    loads = _loads(plan, name, direction, programs, cost)
    joined = _programs(programs)
    num_phases = _count_phases(joined, int(messages.phase.max(initial=-1)))
    rows = _rows(plan.parts[0], num_phases, loads.calls.shape[1], direction, cost)
    seconds = row_seconds(rows, sent, loads.touched, cost)
    return make_flow(loads, messages, joined, seconds, cost)


def row_bytes_of_plan(plan: Plan, name: str, direction: Direction, cost: CostModel) -> Moved:
    """Bytes of row work at every point of every rank's program."""
    programs = [part.mask_plan(name).program(direction) for part in plan.parts]
    sent, loads = (
        _sent(plan.parts[0], programs, cost),
        _loads(plan, name, direction, programs, cost),
    )
    num_phases = _count_phases(_programs(programs), int(sent.phase.max(initial=-1)))
    rows = _rows(plan.parts[0], num_phases, loads.calls.shape[1], direction, cost)
    return rows.moved(sent, loads.touched)


def _rows(
    part: RankPlan, num_phases: int, num_divisions: int, direction: Direction, cost: CostModel
) -> RowWork:
    return RowWork(
        part.num_ranks,
        num_phases,
        num_divisions,
        part.blocks.tokens.astype(np.int64),
        part.blocks.owner.astype(np.int64),
        direction,
        RowBytes(cost.shape, cost.groups_for(part.shape, part.head_groups)),
        cost.graphs,
    )


def _joined(programs: Sequence[Program], column: Callable[[Program], Any]) -> Int64:
    return np.concatenate([column(program) for program in programs]).astype(np.int64)


def _programs(programs: Sequence[Program]) -> Programs:
    return Programs(
        _joined(programs, lambda p: p.instructions[:, 0]),
        _joined(programs, lambda p: p.instructions[:, 1]),
        starts_of(np.asarray([len(p.instructions) for p in programs])),
    )


def _count_phases(programs: Programs, last: int) -> int:
    """Phases of messages and programs. Compiled code does not check: a rank launches each once."""
    rank = np.repeat(np.arange(len(programs.first) - 1), np.diff(programs.first))
    launches = programs.op == Op.LAUNCH
    launched = np.stack([rank[launches], programs.argument[launches]])
    if len(np.unique(launched, axis=1).T) < launches.sum():
        raise ValueError("a rank of the plan launches a phase twice; dyncp.verify says where")
    arguments = programs.argument[programs.op != Op.COMPUTE]
    return 1 + max(last, int(arguments.max(initial=-1)))


def _sent(part: RankPlan, programs: Sequence[Program], cost: CostModel) -> Sent:
    groups = cost.groups_for(part.shape, part.head_groups)
    kind = _joined(programs, lambda p: p.sends.kind)
    group = _joined(programs, lambda p: p.sends.head_group)
    block = _joined(programs, lambda p: p.sends.block)
    per_token = bytes_per_token(cost.shape, groups)[kind, group]
    return Sent(
        phase=_joined(programs, lambda p: p.sends.phase),
        source=np.repeat(np.arange(len(programs)), [len(p.sends) for p in programs]),
        target=_joined(programs, lambda p: p.sends.peer),
        kind=kind,
        group=group,
        block=block,
        size=per_token * part.blocks.tokens[block],
    )


def _loads(
    plan: Plan, name: str, direction: Direction, programs: Sequence[Program], cost: CostModel
) -> Loads:
    part = plan.parts[0]
    tiles = [p.mask_plan(name).tiles for p in plan.parts]
    group, q_block, k_block, pairs = (
        np.concatenate([getattr(t, column) for t in tiles]).astype(np.int64)
        for column in ("head_group", "q_block", "k_block", "pairs")
    )
    rows, keys = part.blocks.tokens[q_block], part.blocks.tokens[k_block]
    heads = cost.heads_of(cost.groups_for(part.shape, part.head_groups))[group]
    seconds = cost.tile_seconds(pairs, rows, keys, heads, direction)
    division = _joined(programs, lambda p: p.tile_division)
    num_divisions = int(division.max(initial=0)) + 1
    rank = np.repeat(np.arange(plan.num_ranks), [len(t) for t in tiles])
    cell, num_cells = rank * num_divisions + division, plan.num_ranks * num_divisions
    called = CallTiles(cell, group, q_block, k_block, pairs, rows, keys, heads)
    blocks, more = CallBlocks.of(called, direction), None
    if cost.knows_rows(direction):
        more = more_seconds(called, blocks, seconds, num_cells, direction, cost)
    touched = None if direction is Direction.BACKWARD else Touched(*blocks[:3])
    return Loads.of(cell, group, seconds, plan.num_ranks, num_divisions, more, touched)
