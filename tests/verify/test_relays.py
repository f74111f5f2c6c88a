"""Relayed blocks and results that are summed on the way keep the invariants as well.

Three ranks own one block each of a causal sequence and compute their own rows. Block 0 reaches
rank 2 through rank 1, and its gradient comes back the same way, summed on rank 1:

    forward    phase 0: KV 0 from 0 to 1, KV 1 from 1 to 2      phase 1: KV 0 from 1 to 2
    backward   the same, then phase 2: DKV 0 and 1 from 2 to 1  phase 3: DKV 0 from 1 to 0
"""

import numpy as np
import pytest
from verify_edits import steps_of, with_steps
from verify_plans import dense, equal, inputs_of, run

from dyncp import AttentionShape, Batch, Plan, masks
from dyncp.arrays import frozen
from dyncp.blocks import BlockGraph, build_graph
from dyncp.placement import Limits, Placement, measure_balance
from dyncp.plan import Direction, Layout, Op, Payload, assemble_plan
from dyncp.schedule import Schedule, Transfers
from dyncp.verify import PlanError, check_plan, verify_plan

BATCH = Batch.of([masks.causal(12)])
KV, DKV = Payload.KV, Payload.DKV
# phase, source, target, kind, head group, block
INPUTS = [(0, 0, 1, KV, 0, 0), (0, 1, 2, KV, 0, 1), (1, 1, 2, KV, 0, 0)]
RESULTS = [(2, 2, 1, DKV, 0, 0), (2, 2, 1, DKV, 0, 1), (3, 1, 0, DKV, 0, 0)]


def schedule_of(graph: BlockGraph, transfers: list[tuple[int, ...]]) -> Schedule:
    tiles = graph.tiles["default"]
    phases = transfers[-1][0] + 1
    return Schedule(
        num_divisions=2,
        tile_division=frozen(tiles.q_block != tiles.k_block),
        transfers=Transfers(*(frozen(column) for column in np.transpose(transfers))),
        phase_after_division=frozen([-1, -1, 1, 1][:phases]),
        phase_after_phase=frozen([-1, 0, -1, 2][:phases]),
        phase_feeds=frozen([1, 1, 2, 2][:phases]),
    )


@pytest.fixture
def relay_plan() -> Plan:
    """Rank 1 sends the gradient of block 0 after merging the contribution of rank 2."""
    graph = build_graph(BATCH, AttentionShape(2, 1, 3, "fp64"), [4])
    placement = Placement.where_queries_live(graph, 3, np.arange(3), "relay", static=False)
    schedules = {
        "default": (schedule_of(graph, INPUTS), schedule_of(graph, [*INPUTS, *RESULTS])),
    }
    balance = measure_balance(graph, placement, Limits())
    return assemble_plan(graph, placement, schedules, balance, Layout(4, 1))


def hurried(plan: Plan) -> Plan:
    """Rank 1 launches phase 3 before it waits for phase 2."""
    steps = steps_of(plan, 1, Direction.BACKWARD)
    wait, launch = steps.index((Op.WAIT, 2)), steps.index((Op.LAUNCH, 3))
    assert wait < launch
    steps[wait], steps[launch] = steps[launch], steps[wait]
    return with_steps(plan, 1, Direction.BACKWARD, steps)


def test_relayed_blocks_and_reduced_results_are_verified(relay_plan: Plan) -> None:
    check_plan(relay_plan, BATCH)
    x = inputs_of(relay_plan)
    assert equal(run(relay_plan, "default", x), dense(BATCH, "default", x))


def test_a_result_that_is_passed_on_before_it_is_complete_is_found(relay_plan: Plan) -> None:
    plan = hurried(relay_plan)
    violations = verify_plan(plan, BATCH)
    assert {v.invariant for v in violations} >= {3, 4}
    assert any("before all other ranks' results" in v.sentence for v in violations)
    x = inputs_of(plan)
    assert not equal(run(plan, "default", x), dense(BATCH, "default", x))


def test_a_relay_before_the_block_has_arrived_is_found(relay_plan: Plan) -> None:
    plan = relay_plan
    steps = steps_of(plan, 1, Direction.FORWARD)
    wait, launch = steps.index((Op.WAIT, 0)), steps.index((Op.LAUNCH, 1))
    steps[wait], steps[launch] = steps[launch], steps[wait]
    early = with_steps(plan, 1, Direction.FORWARD, steps)
    violations = verify_plan(early, BATCH)
    assert any(v.invariant == 3 and "has not arrived" in v.sentence for v in violations)
    x = inputs_of(plan)
    try:
        assert not equal(run(early, "default", x), dense(BATCH, "default", x))
    except PlanError:
        return
