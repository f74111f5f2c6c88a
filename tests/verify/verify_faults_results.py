"""Faults of partial results (invariant 4)."""

import numpy as np
from verify_edits import (
    BACKWARD,
    FORWARD,
    fault,
    in_company,
    mask_of,
    mirrored,
    program_of,
    ranks_of,
    resent,
    rows_of,
    steps_of,
    table_of,
    transfers,
    with_program,
    with_rows,
    with_steps,
)

from dyncp.arrays import frozen
from dyncp.plan import Messages, Op, Payload, Plan, Space


@fault(2, "neither local nor in a slot", numerical=True)
def dkv_destinations_swapped_on_both_sides(plan: Plan) -> Plan:
    """The gradients of two key blocks go to each other's owners."""
    found = list(transfers(plan, BACKWARD, Payload.DKV))
    for rank, row in found:
        for other, second in found:
            strangers = rank == other and row[1] != second[1] and row[0] == second[0]
            if strangers and not (_has(plan, second[1], row) or _has(plan, row[1], second)):
                plan = resent(plan, BACKWARD, rank, row, rank, second[1])
                return resent(plan, BACKWARD, rank, second, rank, row[1])
    raise LookupError


def _has(plan: Plan, rank: int, row: tuple) -> bool:
    """Whether the rank has a slot for the block of a transfer of gradients."""
    space = Space.KV if row[2] == Payload.DKV else Space.Q
    slots = rows_of(program_of(plan, rank, BACKWARD).slots)
    return (space, *row[3:]) in [slot[:3] for slot in slots]


@fault(2, "neither local nor in a slot", numerical=True)
def dq_sent_to_a_wrong_rank(plan: Plan) -> Plan:
    for rank, row in transfers(plan, BACKWARD, Payload.DQ):
        for other in set(ranks_of(plan)) - {rank, row[1]}:
            if not _has(plan, other, row):
                return resent(plan, BACKWARD, rank, row, rank, other)
    raise LookupError


@fault(4, "missing", numerical=True)
def dq_sent_to_a_rank_that_only_borrows_the_block(plan: Plan) -> Plan:
    """It has a slot for the block, so it accepts the gradient, which never reaches its owner."""
    for rank, row in transfers(plan, BACKWARD, Payload.DQ):
        for other in set(ranks_of(plan)) - {rank, row[1]}:
            if _has(plan, other, row):
                return resent(plan, BACKWARD, rank, row, rank, other)
    raise LookupError


@fault(4, "out of order", numerical=False)
def receives_listed_in_another_order(plan: Plan) -> Plan:
    """The peers of a phase change places: the same results, merged in another order."""
    for rank in ranks_of(plan):
        rows = rows_of(program_of(plan, rank, FORWARD).receives)
        for phase in {row[0] for row in rows if row[2] == Payload.OUT}:
            if len({row[1] for row in rows if row[0] == phase}) > 1:
                rows.sort(key=lambda row: (row[0], -row[1] if row[0] == phase else row[1]))
                return with_program(plan, rank, FORWARD, receives=table_of(Messages, rows))
    raise LookupError


@fault(4, "merged more than once", numerical=True)
def result_merged_twice(plan: Plan) -> Plan:
    rank, row = next(transfers(plan, FORWARD, Payload.OUT))
    sends = rows_of(program_of(plan, rank, FORWARD).sends)
    receives = rows_of(program_of(plan, row[1], FORWARD).receives)
    plan = with_rows(plan, rank, FORWARD, "sends", [*sends, row])
    return with_rows(plan, row[1], FORWARD, "receives", [*receives, mirrored(rank, row)])


@fault(4, "is never sent", numerical=True)
def result_never_sent(plan: Plan) -> Plan:
    rank, row = in_company(plan, BACKWARD, Payload.DKV)
    sends = rows_of(program_of(plan, rank, BACKWARD).sends)
    receives = rows_of(program_of(plan, row[1], BACKWARD).receives)
    sends.remove(row)
    receives.remove(mirrored(rank, row))
    plan = with_rows(plan, rank, BACKWARD, "sends", sends)
    return with_rows(plan, row[1], BACKWARD, "receives", receives)


@fault(4, "was sent in phase", numerical=True)
def tile_computed_after_its_result_left(plan: Plan) -> Plan:
    """A tile moves to the last division, after the result of its block was sent."""
    for rank in ranks_of(plan):
        mask, program = mask_of(plan, rank), program_of(plan, rank, FORWARD)
        steps = steps_of(plan, rank, FORWARD)
        last = max((i, argument) for i, (op, argument) in enumerate(steps) if op == Op.COMPUTE)
        for row in rows_of(program.sends):
            reads = (mask.tiles.q_block == row[4]) & (mask.tiles.head_group == row[3])
            early = steps.index((Op.LAUNCH, row[0])) < last[0]
            if row[2] == Payload.OUT and early and reads.any():
                division = program.tile_division.copy()
                division[np.flatnonzero(reads)[0]] = last[1]
                kept = [s for s in steps if s[0] != Op.COMPUTE or s[1] in division]
                plan = with_program(plan, rank, FORWARD, tile_division=frozen(division))
                return with_steps(plan, rank, FORWARD, kept)
    raise LookupError
