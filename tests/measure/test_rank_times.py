"""Timed ranks: every kernel call is counted in its division, and loads are those of the plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks, plan_batch
from dyncp.blocks import Direction
from dyncp.cost import CostModel, find_profile
from dyncp.measure.kernel_seconds import KernelRun
from dyncp.measure.loads import count_kernel_tiles, plan_loads, rank_pairs
from dyncp.measure.ours import KernelChoice
from dyncp.measure.rank_times import seconds_by_call, time_part
from dyncp.measure.timing import Repeats, time_call
from dyncp.planner import PlannerConfig
from dyncp.simulate import simulate_plan
from strategies import masks_of

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, "fp32")
COST = CostModel(find_profile("cpu_gloo"), SHAPE)
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
    assert timed.repeats == 3
    assert 0 < timed.seconds == timed.host_seconds < 0.1
    with pytest.raises(ValueError, match="repeats are 0"):
        Repeats(timed=0)


@pytest.mark.parametrize("rank", range(3))
def test_every_division_with_tiles_has_its_time(rank):
    times = time_part(PLAN.parts[rank], SHAPE, KernelChoice("cpu"), CPU, Repeats(3, 1))
    for direction in Direction:
        loads = [x for x in plan_loads(PLAN, BATCH, direction, COST) if x.rank == rank]
        measured = times[direction]
        assert set(np.flatnonzero(measured.division_seconds)) == {x.division for x in loads}
        assert measured.kernel_seconds > 0


def test_attention_kernels_are_counted_in_their_calls_and_helpers_in_none():
    names = ("FlashAttentionBackwardPreprocess", "attend_backward_queries", "merge_rows") * 2
    kernels = [KernelRun(name, float(i)) for i, name in enumerate((*names, "attend_tiles", "sum"))]
    assert [kernel.seconds for kernel in kernels if kernel.is_attention] == [1, 4, 6]
    assert seconds_by_call(kernels, 3).tolist() == [1, 4, 6]
    assert seconds_by_call(kernels, 1).tolist() == [11]
    assert seconds_by_call(kernels, 0).tolist() == []


def test_kernels_that_do_not_divide_into_calls_are_shared_out(caplog):
    kernels = [KernelRun("attend_tiles", 2.0)] * 3
    assert seconds_by_call(kernels, 2).tolist() == [3, 3]
    assert "3 attention kernels in 2 kernel calls" in caplog.text


@pytest.mark.parametrize("profile", [COST.profile, CALIBRATED], ids=["plain", "edges and rows"])
@pytest.mark.parametrize("direction", Direction)
def test_loads_add_up_to_what_the_batch_has_and_the_simulator_predicts(direction, profile):
    cost = CostModel(profile, SHAPE)
    loads = plan_loads(PLAN, BATCH, direction, cost)
    pairs = sum(mask.num_pairs for mask in BATCH.masks["default"])
    assert sum(load.pairs for load in loads) == pairs * SHAPE.q_heads
    assert rank_pairs(PLAN, COST).sum() == pairs * SHAPE.q_heads
    topology = find_profile("cpu_gloo").topology(1, 3)
    run = simulate_plan(PLAN, topology, cost).attention["default"][direction]
    predicted = np.bincount([x.rank for x in loads], [x.predicted_seconds for x in loads])
    assert predicted == pytest.approx(run.rank_compute_seconds)
    for load in loads:
        side = COST.profile.kernel_tile
        assert load.pairs <= load.kernel_tiles * side**2
        assert 0 < load.calls <= 2


@given(data=st.data(), side=st.integers(1, 9), length=st.integers(1, 40))
def test_kernel_tiles_cover_all_pairs_and_are_no_more_than_the_grid(data, side, length):
    mask, ends = data.draw(masks_of(length)), st.integers(0, length)
    drawn = [sorted(data.draw(st.tuples(ends, ends))) for _ in range(2)]
    rows, keys = ((min(a, length - 1), max(b, min(a, length - 1) + 1)) for a, b in drawn)
    part = mask.dense()[slice(*rows), slice(*keys)]
    touched = {(q // side, k // side) for q, k in zip(*np.nonzero(part), strict=True)}
    grid = -(-part.shape[0] // side) * -(-part.shape[1] // side)
    assert len(touched) <= count_kernel_tiles(mask, rows, keys, side) <= grid


def test_kernel_tiles_of_known_blocks():
    causal = masks.causal(2048)
    assert count_kernel_tiles(causal, (0, 1024), (0, 1024), 128) == 36
    assert count_kernel_tiles(causal, (1024, 2048), (0, 1024), 128) == 64
    assert count_kernel_tiles(causal, (0, 1024), (1024, 2048), 128) == 0


def test_a_rank_without_tiles_is_timed_too():
    config = PlannerConfig(solver="zigzag/cp1")
    plan = plan_batch(Batch.of([masks.causal(40)]), Topology(1, 2), SHAPE, config)
    idle = int(np.flatnonzero(plan.parts[0].tokens_per_rank == 0)[0])
    times = time_part(plan.parts[idle], SHAPE, KernelChoice("cpu"), CPU, Repeats(2, 0))
    assert all(measured.kernel_seconds == 0 for measured in times.values())
