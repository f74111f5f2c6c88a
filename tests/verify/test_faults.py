"""Every fault of the catalogue is reported under its invariant; wrong results show when run."""

import numpy as np
import pytest
from verify_edits import owner, transfers
from verify_faults import FAULTS, NAME, Fault
from verify_plans import dense, equal, inputs_of, rich_batch, rich_plan, run

from dyncp import Plan
from dyncp.plan import Direction, Payload
from dyncp.verify import PlanError, check_plan, verify_plan

# A loose tolerance would hide the small error of a single key.
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def plan() -> Plan:
    healthy = rich_plan()
    check_plan(healthy, rich_batch())
    return healthy


def test_the_plan_to_break_uses_all_that_can_break(plan: Plan) -> None:
    programs = [part.masks[NAME].program(d) for part in plan.parts for d in Direction]
    assert {int(k) for p in programs for k in p.sends.kind} == set(range(6))
    rows = [(p.slots.row, p.slots.space, p.slots.head_group) for p in programs]
    assert any(len(np.unique(np.stack(r), axis=1).T) < len(r[0]) for r in rows), "no slot is reused"
    for direction, inputs in (
        (Direction.FORWARD, (Payload.Q, Payload.KV)),
        (Direction.BACKWARD, (Payload.Q_DOUT, Payload.KV)),
    ):
        sent = list(transfers(plan, direction, *inputs))
        assert any(owner(plan, row[4]) != rank for rank, row in sent), "no block is passed on"
        assert len({row[0] for _, row in sent}) > 3, "few phases of inputs"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_reported_as_a_violation_of_its_invariant(fault: Fault, plan: Plan) -> None:
    violations = verify_plan(fault.make(plan), rich_batch())
    sentences = [v.sentence for v in violations if v.invariant == fault.invariant]
    assert any(fault.word in sentence for sentence in sentences), violations


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.numerical], ids=lambda f: f.name)
def test_a_fault_shows_when_the_plan_is_run(fault: Fault, plan: Plan) -> None:
    broken, x = fault.make(plan), inputs_of(plan)
    try:
        result = run(broken, NAME, x)
    except (PlanError, ValueError):
        return
    right = equal(result, dense(rich_batch(), NAME, x), TOLERANCE)
    assert not right, "the interpreter does not see the fault"


@pytest.mark.parametrize("fault", [f for f in FAULTS if not f.numerical], ids=lambda f: f.name)
def test_other_faults_leave_the_results_right(fault: Fault, plan: Plan) -> None:
    """Only the verifier finds them."""
    x = inputs_of(plan)
    right = equal(run(fault.make(plan), NAME, x), dense(rich_batch(), NAME, x), TOLERANCE)
    assert right, "the fault is numerical"
