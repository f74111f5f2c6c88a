"""Faults of inputs and slots (invariant 2)."""

from collections.abc import Iterator

import numpy as np
from verify_edits import (
    FORWARD,
    fault,
    mask_of,
    program_of,
    ranks_of,
    rows_of,
    steps_of,
    table_of,
    tokens,
    with_column,
    with_program,
)

from dyncp.arrays import frozen
from dyncp.plan import Direction, Op, Plan, Space


@fault(2, "has not arrived", numerical=True)
def tile_before_its_inputs_arrive(plan: Plan) -> Plan:
    for rank in ranks_of(plan):
        program = program_of(plan, rank, FORWARD)
        late = np.flatnonzero(program.tile_division == program.tile_division.max())
        if len(late) > 1 and (program.tile_division == 0).any():
            division = program.tile_division.copy()
            division[late[0]] = 0
            return with_program(plan, rank, FORWARD, tile_division=frozen(division))
    raise LookupError


def _with_slot(plan: Plan, rank: int, direction: Direction, index: int, **cells: int) -> Plan:
    slots = program_of(plan, rank, direction).slots
    for column, value in cells.items():
        slots = with_column(slots, column, index, value)
    return with_program(plan, rank, direction, slots=slots)


@fault(2, "still holds", numerical=True)
def slot_reused_too_early(plan: Plan) -> Plan:
    """A slot is moved onto another that is still read after being overwritten."""
    for rank in ranks_of(plan):
        slots = rows_of(program_of(plan, rank, FORWARD).slots)
        for early, (j, late) in _slot_pairs(slots):
            same_workspace = early[:2] == late[:2]
            overwritten = early[4] < late[4] <= early[5]
            if same_workspace and overwritten and tokens(plan, late[2]) <= tokens(plan, early[2]):
                return _with_slot(plan, rank, FORWARD, j, row=early[3])
    raise LookupError


def _slot_pairs(slots: list) -> Iterator[tuple[tuple, tuple[int, tuple]]]:
    for early in slots:
        for j, late in enumerate(slots):
            yield early, (j, late)


@fault(2, "off the borders", numerical=False)
def slot_off_its_alignment(plan: Plan) -> Plan:
    """The slot moves to new rows after the workspace, one row off the alignment."""
    program = program_of(plan, 0, FORWARD)
    space, group, block, *_ = rows_of(program.slots)[0]
    rows = program.workspace_rows.copy()
    alignment = plan.parts[0].slot_alignment
    row = -(-int(rows[space, group]) // alignment) * alignment + 1
    rows[space, group] = row + tokens(plan, block)
    plan = with_program(plan, 0, FORWARD, workspace_rows=frozen(rows))
    return _with_slot(plan, 0, FORWARD, 0, row=row)


@fault(2, "outside its workspace", numerical=True)
def slot_on_own_rows(plan: Plan) -> Plan:
    """It overwrites a local key block that is read later."""
    for rank in ranks_of(plan):
        program, tiles = program_of(plan, rank, FORWARD), mask_of(plan, rank).tiles
        steps, place = steps_of(plan, rank, FORWARD), plan.parts[rank].block_row
        for index, slot in enumerate(rows_of(program.slots)):
            for (_, k_block, group, _), division in zip(
                rows_of(tiles), program.tile_division.tolist(), strict=True
            ):
                later = steps.index((Op.COMPUTE, division)) > slot[4]
                if slot[:2] == (Space.KV, group) and later and place[k_block] >= 0:
                    return _with_slot(plan, rank, FORWARD, index, row=int(place[k_block]))
    raise LookupError


@fault(2, "outside its workspace", numerical=True)
def slot_behind_its_workspace(plan: Plan) -> Plan:
    rows = program_of(plan, 0, FORWARD).workspace_rows
    return _with_slot(plan, 0, FORWARD, 0, row=int(rows.max()))


@fault(2, "used after its end", numerical=True)
def slot_given_up_too_early(plan: Plan) -> Plan:
    slots = program_of(plan, 0, FORWARD).slots
    index = int(np.flatnonzero(slots.last > slots.first)[0])
    return _with_slot(plan, 0, FORWARD, index, last=int(slots.first[index]))


@fault(2, "filled by another instruction", numerical=False)
def slot_held_before_it_is_filled(plan: Plan) -> Plan:
    slots = program_of(plan, 0, FORWARD).slots
    return _with_slot(plan, 0, FORWARD, 0, first=int(slots.first[0]) - 1)


@fault(2, "only one", numerical=False)
def slot_doubled(plan: Plan) -> Plan:
    program = program_of(plan, 0, FORWARD)
    rows = rows_of(program.slots)
    slots = table_of(type(program.slots), [*rows, rows[0]])
    return with_program(plan, 0, FORWARD, slots=slots)


@fault(2, "neither local nor in a slot", numerical=True)
def slot_missing(plan: Plan) -> Plan:
    program = program_of(plan, 0, FORWARD)
    slots = table_of(type(program.slots), rows_of(program.slots)[1:])
    return with_program(plan, 0, FORWARD, slots=slots)


@fault(2, "workspace", numerical=True)
def workspace_smaller_than_own_rows(plan: Plan) -> Plan:
    rows = program_of(plan, 3, FORWARD).workspace_rows.copy()
    rows[Space.Q, 0] = plan.parts[3].local_rows - 1
    return with_program(plan, 3, FORWARD, workspace_rows=frozen(rows))
