"""Faults of messages and phases (invariant 3)."""

from itertools import pairwise

from verify_edits import (
    BACKWARD,
    FORWARD,
    Step,
    doubled_step,
    fault,
    in_company,
    mask_of,
    mirrored,
    program_of,
    ranks_of,
    resent,
    rows_of,
    steps_of,
    tokens,
    transfers,
    with_column,
    with_program,
    with_rows,
    with_steps,
)

from dyncp.plan import Op, Payload, Plan, Space


@fault(3, "has no receive", numerical=True)
def receive_missing(plan: Plan) -> Plan:
    rank, row = in_company(plan, FORWARD, Payload.KV)
    rows = rows_of(program_of(plan, row[1], FORWARD).receives)
    rows.remove(mirrored(rank, row))
    return with_rows(plan, row[1], FORWARD, "receives", rows)


@fault(3, "does not send it", numerical=True)
def send_missing(plan: Plan) -> Plan:
    rank, row = in_company(plan, BACKWARD, Payload.Q_DOUT)
    rows = rows_of(program_of(plan, rank, BACKWARD).sends)
    rows.remove(row)
    return with_rows(plan, rank, BACKWARD, "sends", rows)


@fault(3, "does not send it", numerical=True)
def receive_of_a_block_of_another_size(plan: Plan) -> Plan:
    for rank, row in transfers(plan, FORWARD, Payload.KV):
        slots = program_of(plan, row[1], FORWARD).slots
        held = slots.block[(slots.space == Space.KV) & (slots.head_group == row[3])]
        for block in held.tolist():
            if tokens(plan, block) != tokens(plan, row[4]):
                rows = rows_of(program_of(plan, row[1], FORWARD).receives)
                rows.remove(mirrored(rank, row))
                other = (*mirrored(rank, row)[:4], block)
                return with_rows(plan, row[1], FORWARD, "receives", [*rows, other])
    raise LookupError


@fault(3, "in another at the receiver", numerical=True)
def dkv_destinations_swapped_at_the_sender(plan: Plan) -> Plan:
    """Two results of one message change places, so that each is added to the other's block."""
    for rank in ranks_of(plan):
        sends = program_of(plan, rank, BACKWARD).sends
        rows = rows_of(sends)
        for index, (row, follower) in enumerate(pairwise(rows)):
            same = row[:4] == follower[:4] and row[2] == Payload.DKV
            if same and tokens(plan, row[4]) == tokens(plan, follower[4]):
                swapped = with_column(sends, "block", [index, index + 1], [follower[4], row[4]])
                return with_program(plan, rank, BACKWARD, sends=swapped)
    raise LookupError


@fault(3, "stuck", numerical=True)
def phases_in_a_cycle(plan: Plan) -> Plan:
    """One rank waits for phase x before it launches y, another for y before it launches x."""
    for a, row in transfers(plan, FORWARD, *Payload):
        for b, back in transfers(plan, FORWARD, *Payload):
            y, x = row[0], back[0]
            if row[1] == b and back[1] == a and x < y:
                first = _moved_ahead(plan, a, [(Op.LAUNCH, x), (Op.WAIT, x), (Op.LAUNCH, y)])
                return _moved_ahead(first, b, [(Op.LAUNCH, y), (Op.WAIT, y), (Op.LAUNCH, x)])
    raise LookupError


def _moved_ahead(plan: Plan, rank: int, ahead: list[Step]) -> Plan:
    rest = [step for step in steps_of(plan, rank, FORWARD) if step not in ahead]
    return with_steps(plan, rank, FORWARD, [*ahead, *rest])


@fault(3, "before launching", numerical=True)
def wait_before_launch(plan: Plan) -> Plan:
    steps = steps_of(plan, 0, FORWARD)
    phase = next(argument for op, argument in steps if op == Op.WAIT)
    here, there = steps.index((Op.LAUNCH, phase)), steps.index((Op.WAIT, phase))
    steps[here], steps[there] = steps[there], steps[here]
    return with_steps(plan, 0, FORWARD, steps)


@fault(3, "in increasing order", numerical=False)
def launches_in_decreasing_order(plan: Plan) -> Plan:
    """Two phases of inputs that owners send at the start are launched in reverse order."""
    steps = steps_of(plan, 0, FORWARD)
    assert [op for op, _ in steps[:2]] == [Op.LAUNCH, Op.LAUNCH]
    return with_steps(plan, 0, FORWARD, [steps[1], steps[0], *steps[2:]])


@fault(3, "never launched", numerical=True)
def phase_never_launched(plan: Plan) -> Plan:
    rank, row = next(transfers(plan, FORWARD, Payload.OUT))
    steps = [s for s in steps_of(plan, rank, FORWARD) if s != (Op.LAUNCH, row[0])]
    return with_steps(plan, rank, FORWARD, steps)


@fault(3, "never waited for", numerical=True)
def phase_never_waited_for(plan: Plan) -> Plan:
    _, row = next(transfers(plan, FORWARD, Payload.OUT))
    steps = [s for s in steps_of(plan, row[1], FORWARD) if s != (Op.WAIT, row[0])]
    return with_steps(plan, row[1], FORWARD, steps)


@fault(3, "an instruction comes twice", numerical=True)
def phase_launched_twice(plan: Plan) -> Plan:
    rank, row = next(transfers(plan, FORWARD, Payload.KV))
    steps = steps_of(plan, rank, FORWARD)
    doubled = [steps[i] for i in doubled_step(steps, (Op.LAUNCH, row[0]))]
    return with_steps(plan, rank, FORWARD, doubled)


@fault(3, "before all of its tiles", numerical=True)
def results_launched_before_their_division(plan: Plan) -> Plan:
    """The launch of a result moves ahead of the computation of its last tile."""
    rank, row = next(transfers(plan, FORWARD, Payload.OUT))
    tiles, division = mask_of(plan, rank).tiles, program_of(plan, rank, FORWARD).tile_division
    of_block = (tiles.q_block == row[4]) & (tiles.head_group == row[3])
    steps = steps_of(plan, rank, FORWARD)
    steps.remove((Op.LAUNCH, row[0]))
    last = steps.index((Op.COMPUTE, int(division[of_block].max())))
    return with_steps(plan, rank, FORWARD, [*steps[:last], (Op.LAUNCH, row[0]), *steps[last:]])


@fault(2, "neither local nor in a slot", numerical=True)
def input_sent_by_a_rank_that_does_not_have_it(plan: Plan) -> Plan:
    rank, row = in_company(plan, FORWARD, Payload.KV)
    others = set(ranks_of(plan)) - {rank, row[1]}
    for other in others:
        slots = rows_of(program_of(plan, other, FORWARD).slots)
        if (Space.KV, row[3], row[4]) not in [slot[:3] for slot in slots]:
            return resent(plan, FORWARD, rank, row, other, row[1])
    raise LookupError
