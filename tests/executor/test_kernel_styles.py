"""Kernels of every style, and both implementations of row operations, compute dense attention."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Case, Tensors, assert_equal, cases, largest_terms, run_dense, run_virtual
from dyncp import (
    AttentionShape,
    Batch,
    Layout,
    PlannerConfig,
    Topology,
    masks,
    plan_batch,
)
from dyncp.executor.kernel_calls import RankProgram
from dyncp.kernels import CpuKernel, ReferenceKernel, RowState
from dyncp.plan import Direction
from interpreted import needs_interpreter
from kernel_styles import CollectingReference, RoundingKernel
from paced import plan_paced
from sizes import draws, full, pick

STYLES = st.sampled_from([RoundingKernel(), CollectingReference()])
ALIGNED = (64, 128)  # collected sums need slots with this alignment


@draws(80)
@given(case=cases(dtype="fp32", alignments=ALIGNED), kernel=STYLES)
def test_kernels_that_round_or_collect_are_as_exact_as_others(case, kernel):
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    terms = largest_terms(case, "default", tensors)
    assert_equal(run_virtual(case, "default", tensors, kernel=kernel), expected, 1e-5, terms)


@draws(25)
@given(
    case=cases(dtype="fp32", topology=Topology(2, 2), solvers=("random",), alignments=ALIGNED),
    kernel=STYLES,
)
def test_they_are_exact_with_relays_that_sum_results(case, kernel):
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    terms = largest_terms(case, "default", tensors)
    assert_equal(run_virtual(case, "default", tensors, kernel=kernel), expected, 1e-5, terms)


@pytest.mark.parametrize("solver", ["random", "zigzag", "owner_computes"])
@pytest.mark.parametrize("partial", [None, "fp32"])
@pytest.mark.parametrize("kernel", [CpuKernel(), RoundingKernel(), CollectingReference()])
def test_bf16_sums_are_rounded_once(solver, partial, kernel):
    batch = Batch.of([masks.causal(90), masks.lambda_shaped(60, sinks=4, window=16)])
    shape = AttentionShape(4, 2, 32, "bf16", partial)
    config = PlannerConfig(solver, block_size=16, divisions=4, head_groups=2, layout=Layout(64, 4))
    case = Case(batch, plan_batch(batch, Topology(1, 3), shape, config), shape, 0)
    tensors = Tensors.draw(case)
    exact = run_dense(case, "default", tensors, torch.float64).tensors()
    plain = run_dense(case, "default", tensors, torch.bfloat16).tensors()
    ours = run_virtual(case, "default", tensors, kernel=kernel).tensors()
    for name, expected in exact.items():
        allowed = 2 * (plain[name].double() - expected).abs().max()
        assert (ours[name].double() - expected).abs().max() <= allowed, name


@needs_interpreter
@pytest.mark.parametrize(
    ("solver", "dtype"),
    [full("random", "fp32"), ("random", "bf16"), full("zigzag", "fp32"), full("zigzag", "bf16")],
)
def test_triton_row_operations_in_whole_plans(solver, dtype):
    from dyncp.kernels.triton_row_ops import TritonRowOps

    lengths, shape = pick((14, 6), (50, 20)), AttentionShape(4, 2, 8, dtype)
    batch = Batch.of([masks.causal(lengths[0]), masks.full(lengths[1])])
    config = PlannerConfig(
        solver, block_size=pick(5, 9), divisions=3, head_groups=2, layout=Layout(8, 4)
    )
    case = Case(batch, plan_paced(batch, Topology(2, 2), shape, config), shape, 0)
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    results = run_virtual(
        case, "default", tensors, kernel=ReferenceKernel(8), row_ops=TritonRowOps()
    )
    assert_equal(results, expected, 1e-5 if dtype == "fp32" else 3e-2)


@draws(60)
@given(case=cases())
def test_states_follow_one_another_and_say_what_is_touched(case):
    """A row's state before a call is its state after the previous contribution."""
    for part in case.plan.parts:
        mask = part.masks["default"]
        for direction in Direction:
            program = RankProgram(part, mask, direction)
            added = program.contributions
            assert (np.diff(added.time)[~added.first[1:]] > 0).all()
            for calls in program.kernel_calls().values():
                for call in calls:
                    touched = np.zeros(len(call.q_coordinates), np.bool_)
                    for q0, q1, _, _ in call.rectangles.tolist():
                        touched[q0:q1] = True
                        assert call.q_rows.start <= q0 < q1 <= call.q_rows.stop
                    assert ((call.q_states.after != RowState.UNTOUCHED) == touched).all()
                    if direction is Direction.FORWARD:
                        assert (call.k_states.after == RowState.UNTOUCHED).all()
