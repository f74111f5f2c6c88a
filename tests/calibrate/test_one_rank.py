"""Timed ranks: every kernel call is counted in its division, and work is that of the plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.attention_times import rank_pairs

from dyncp import AttentionShape, Batch, Topology, masks, plan_batch
from dyncp.blocks import Direction
from dyncp.calibrate import Repeats, Tools
from dyncp.calibrate.timing import KernelRun, plan_work, seconds_by_call, time_call, time_calls
from dyncp.cost import CostModel, find_profile
from dyncp.planner import PlannerConfig
from dyncp.simulate import simulate_plan

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, "fp32")
COST = CostModel(replace(find_profile("cpu_gloo"), launch_seconds=0.0), SHAPE)
BATCH = Batch.of([masks.lambda_shaped(700, sinks=8, window=100), masks.causal(90)])
CALIBRATED = replace(
    COST.profile,
    edge_forward=3.0,
    edge_backward=5.0,
    row_forward=400.0,
    row_backward=250.0,
    lanes=8,
)
CONFIG = PlannerConfig(solver="bisection", head_groups=2)
PLAN = plan_batch(BATCH, Topology(1, 3), SHAPE, CONFIG)


def test_the_median_call_is_what_counts():
    calls = []

    def run() -> None:
        calls.append(1)

    timed = time_call(run, CPU, Repeats(timed=3, warm_up=2))
    assert len(calls) == 5
    assert 0 < timed.seconds == timed.host_seconds  # on a CPU
    with pytest.raises(ValueError, match="repeats are 0"):
        Repeats(timed=0)


@pytest.mark.parametrize("rank", range(3))
def test_every_division_with_tiles_has_its_time(rank):
    times = time_calls(PLAN.parts[rank], Tools(SHAPE, "cpu", CPU, Repeats(3, 1)))
    for direction in Direction:
        divisions = {x.division for x in plan_work(PLAN, direction, COST) if x.rank == rank}
        measured = times[direction]
        assert set(np.flatnonzero(measured.division_seconds)) == divisions
        assert measured.kernel_seconds > 0


def test_attention_kernels_are_counted_in_their_calls_and_helpers_in_none():
    names = ("FlashAttentionBackwardPreprocess", "attend_backward_queries", "merge_rows") * 2
    kernels = [KernelRun(name, float(i)) for i, name in enumerate((*names, "attend_tiles", "sum"))]
    assert [kernel.seconds for kernel in kernels if kernel.is_attention] == [1, 4, 6]
    assert seconds_by_call(kernels, 3).tolist() == [1, 4, 6]
    assert seconds_by_call(kernels, 1).tolist() == [11]
    assert seconds_by_call(kernels, 0).tolist() == []


def test_kernels_that_do_not_divide_into_calls_count_as_equal_shares(caplog):
    kernels = [KernelRun("attend_tiles", 2.0)] * 3
    assert seconds_by_call(kernels, 2).tolist() == [3, 3]
    assert "3 attention kernels in 2 kernel calls" in caplog.text


@pytest.mark.parametrize("profile", [COST.profile, CALIBRATED], ids=["plain", "edges and rows"])
@pytest.mark.parametrize("direction", Direction)
def test_work_adds_up_to_what_the_batch_has_and_the_simulator_predicts(direction, profile):
    cost = CostModel(profile, SHAPE)
    work = plan_work(PLAN, direction, cost)
    pairs = sum(mask.num_pairs for mask in BATCH.masks["default"])
    assert sum(one.pairs for one in work) == pairs * SHAPE.q_heads
    assert rank_pairs(PLAN, COST).sum() == pairs * SHAPE.q_heads
    topology = find_profile("cpu_gloo").topology(1, 3)
    run = simulate_plan(PLAN, topology, cost).attention["default"][direction]
    predicted = np.bincount([x.rank for x in work], [x.predicted_seconds for x in work])
    assert predicted == pytest.approx(run.rank_compute_seconds)
    assert all(0 < one.calls <= 2 for one in work)


def test_a_rank_without_tiles_is_timed_too():
    config = PlannerConfig(solver="zigzag/cp1")
    plan = plan_batch(Batch.of([masks.causal(40)]), Topology(1, 2), SHAPE, config)
    idle = int(np.flatnonzero(plan.parts[0].tokens_per_rank == 0)[0])
    times = time_calls(plan.parts[idle], Tools(SHAPE, "cpu", CPU, Repeats(2, 0)))
    assert all(measured.kernel_seconds == 0 for measured in times.values())
