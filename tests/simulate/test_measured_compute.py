"""Measured seconds in place of the cost model's."""

import numpy as np
import pytest

from dyncp import AttentionShape, Batch, PlannerConfig, masks, plan_batch
from dyncp.blocks import Direction
from dyncp.cost import CostModel
from dyncp.plan import Op
from dyncp.simulate import simulate_plan
from kernels_only import KERNELS_ONLY

PROFILE, SHAPE = KERNELS_ONLY, AttentionShape(8, 2, 128)
TOPOLOGY, COST = PROFILE.topology(1, 4), CostModel(PROFILE, SHAPE)
PLAN = plan_batch(Batch.of([masks.causal(9000)]), TOPOLOGY, SHAPE, PlannerConfig(solver="zigzag"))


def predicted_compute(direction: Direction) -> np.ndarray:
    """The cost model's own seconds, [ranks, divisions]."""
    run = simulate_plan(PLAN, TOPOLOGY, COST).attention["default"][direction]
    chosen = run.flow.programs.op == Op.COMPUTE
    seconds = np.zeros((4, run.flow.programs.argument[chosen].max() + 1))
    seconds[run.step_rank[chosen], run.flow.programs.argument[chosen]] = run.flow.work[chosen]
    return seconds


def test_the_cost_models_own_seconds_change_nothing():
    compute = {("default", d): predicted_compute(d) for d in Direction}
    plain, given = (
        simulate_plan(PLAN, TOPOLOGY, COST),
        simulate_plan(PLAN, TOPOLOGY, COST, compute=compute),
    )
    assert given.forward_seconds == plain.forward_seconds
    assert given.backward_seconds == plain.backward_seconds


def test_one_slow_rank_makes_the_layer_as_slow():
    slow = predicted_compute(Direction.FORWARD)
    slow[2] *= 10
    found = simulate_plan(PLAN, TOPOLOGY, COST, compute={("default", Direction.FORWARD): slow})
    run = found.attention["default"][0]
    assert run.rank_compute_seconds[2] == pytest.approx(slow[2].sum())
    assert found.forward_seconds >= slow[2].sum()
    assert found.backward_seconds == simulate_plan(PLAN, TOPOLOGY, COST).backward_seconds
