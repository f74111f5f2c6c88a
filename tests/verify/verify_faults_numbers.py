"""Faults of declared balance, bytes and identity (invariants 5, 7 and 8)."""

from dataclasses import replace
from typing import Any

import numpy as np
from verify_edits import (
    FORWARD,
    NAME,
    fault,
    program_of,
    rows_of,
    steps_of,
    table_of,
    tokens,
    transfers,
    with_column,
    with_part,
    with_program,
    with_rows,
)

from dyncp.arrays import frozen
from dyncp.blocks import bytes_per_token
from dyncp.placement import Limits
from dyncp.plan import Op, Payload, Plan, RankPlan, Space, Stretches


def _with_balance(plan: Plan, **changes: Any) -> Plan:
    return Plan.of([replace(part, balance=replace(part.balance, **changes)) for part in plan.parts])


@fault(5, "declares compute", numerical=False)
def compute_balance_changed(plan: Plan) -> Plan:
    return _with_balance(plan, compute_max_over_mean=1.0)


@fault(5, "declares tokens", numerical=False)
def token_balance_changed(plan: Plan) -> Plan:
    return _with_balance(plan, tokens_max_over_mean=1.0)


@fault(5, "no reason", numerical=False)
def limits_exceeded_without_a_reason(plan: Plan) -> Plan:
    return _with_balance(plan, limits=Limits(0.0, 0.0), reason="")


@fault(7, "declares", numerical=False)
def declared_bytes_changed(plan: Plan) -> Plan:
    part = plan.parts[1]
    forward, backward = part.declared_bytes[NAME]
    declared = {**part.declared_bytes, NAME: (forward, backward + 8)}
    return with_part(plan, 1, declared_bytes=declared)


@fault(7, "not static", numerical=False)
def block_sent_that_nobody_needs(plan: Plan) -> Plan:
    """A complete transfer with a slot, honestly declared, of a block that no tile reads there."""
    source, row = next(transfers(plan, FORWARD, Payload.KV))
    target, phase, group = row[1], row[0], 0
    program = program_of(plan, target, FORWARD)
    held = program.slots.block[(program.slots.space == Space.KV) & (program.slots.head_group == 0)]
    mine = np.flatnonzero(plan.parts[0].blocks.owner == source)
    block = int(np.setdiff1d(mine, held)[0])
    plan = _with_transfer(plan, source, target, (phase, Payload.KV, group, block))
    per_token = bytes_per_token(plan.parts[0].shape, plan.parts[0].head_groups)
    size = int(per_token[Payload.KV, group]) * tokens(plan, block)
    parts: list[RankPlan] = []
    for part in plan.parts:
        forward, backward = part.declared_bytes[NAME]
        declared = {**part.declared_bytes, NAME: (forward + size, backward)}
        parts.append(replace(part, declared_bytes=declared))
    return Plan.of(parts)


def _with_transfer(plan: Plan, source: int, target: int, what: tuple) -> Plan:
    phase, kind, group, block = what
    rows = rows_of(program_of(plan, source, FORWARD).sends)
    plan = with_rows(plan, source, FORWARD, "sends", [*rows, (phase, target, kind, group, block)])
    rows = rows_of(program_of(plan, target, FORWARD).receives)
    entry = (phase, source, kind, group, block)
    plan = with_rows(plan, target, FORWARD, "receives", [*rows, entry])
    program = program_of(plan, target, FORWARD)
    alignment = plan.parts[target].slot_alignment
    row = -(-int(program.workspace_rows[Space.KV, group]) // alignment) * alignment
    at = steps_of(plan, target, FORWARD).index((Op.WAIT, phase))
    slot = (int(Space.KV), group, block, row, at, at)
    workspace = program.workspace_rows.copy()
    workspace[Space.KV, group] = row + tokens(plan, block)
    slots = table_of(type(program.slots), [*rows_of(program.slots), slot])
    changes = {"slots": slots, "workspace_rows": frozen(workspace)}
    return with_program(plan, target, FORWARD, **changes)


@fault(8, "fingerprint", numerical=False)
def fingerprint_of_another_batch(plan: Plan) -> Plan:
    return with_part(plan, 2, fingerprint="0" * 32)


@fault(8, "stretches (which token comes before which) are not the batch's", numerical=False)
def stretches_of_another_text(plan: Plan) -> Plan:
    part = plan.parts[2]
    start = np.append(part.stretches.start, part.lengths.sum() - 1)
    before = np.append(part.stretches.before, part.lengths.sum() - 2)
    return with_part(plan, 2, stretches=Stretches(frozen(start), frozen(before)))


@fault(8, "a stretch follows a token of another sequence", numerical=True)
def stretch_that_follows_another_sequence(plan: Plan) -> Plan:
    stretches = with_column(plan.parts[1].stretches, "before", -1, 0)
    return with_part(plan, 1, stretches=stretches)


@fault(8, "a sequence begins inside one", numerical=True)
def stretches_that_leave_a_sequence_out(plan: Plan) -> Plan:
    stretches = with_column(plan.parts[1].stretches, "start", -1, plan.parts[1].lengths.sum() - 1)
    return with_part(plan, 1, stretches=stretches)


@fault(8, "digest", numerical=False)
def digest_of_another_plan(plan: Plan) -> Plan:
    parts = list(plan.parts)
    parts[1] = replace(parts[1], digest="0" * 32)
    return Plan(tuple(parts))


@fault(8, "is of rank 1", numerical=True)
def parts_in_another_order(plan: Plan) -> Plan:
    return Plan.of([plan.parts[1], plan.parts[0], *plan.parts[2:]])


@fault(8, "ranks, the plan of 3", numerical=True)
def part_missing(plan: Plan) -> Plan:
    return Plan.of(plan.parts[:-1])
