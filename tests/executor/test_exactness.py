"""Any batch, any mask, any placement: the result is dense attention."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Case, Tensors, assert_equal, cases, run_dense, run_virtual
from dense import relative_error
from dyncp import (
    AttentionShape,
    Batch,
    Layout,
    PlannerConfig,
    Topology,
    masks,
    plan_batch,
)
from dyncp.kernels import CpuKernel, ReferenceKernel
from dyncp.plan import Direction, Payload
from paced import plan_paced
from sizes import draws

KERNELS = st.sampled_from([CpuKernel(), ReferenceKernel(4), ReferenceKernel()])
DYNAMIC = ("random", "bisection", "owner_computes", "uncut")


@draws(250)
@given(case=cases(), kernel=KERNELS)
def test_outputs_and_gradients_equal_dense_fp64_attention(case, kernel):
    tensors = Tensors.draw(case)
    for name in case.batch.masks:
        given_results = run_virtual(case, name, tensors, kernel=kernel)
        assert_equal(given_results, run_dense(case, name, tensors, torch.float64), 1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
@draws(40)
@given(data=st.data(), kernel=KERNELS)
def test_blocks_passed_on_and_sums_at_node_borders_leave_results_exact(ranks, data, kernel):
    case = data.draw(cases(topology=Topology(2, ranks), solvers=DYNAMIC))
    tensors = Tensors.draw(case)
    for name in case.batch.masks:
        given_results = run_virtual(case, name, tensors, kernel=kernel)
        assert_equal(given_results, run_dense(case, name, tensors, torch.float64), 1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_scattered_sequence_on_two_nodes_is_exact_with_many_relays(ranks):
    batch, shape = Batch.of([masks.causal(50), masks.full(30)]), AttentionShape(4, 2, 8, "fp64")
    config = PlannerConfig("random", block_size=4, head_groups=2, divisions=5, layout=Layout(4))
    plan = plan_paced(batch, Topology(2, ranks), shape, config)
    for direction in Direction:
        programs = [part.masks["default"].program(direction) for part in plan.parts]
        owner = plan.parts[0].blocks.owner
        for kinds in ((Payload.Q, Payload.KV, Payload.Q_DOUT), (Payload.OUT, Payload.DQ)):
            relayed = [
                rank
                for rank, p in enumerate(programs)
                for kind, peer, block in zip(p.sends.kind, p.sends.peer, p.sends.block, strict=True)
                if kind in kinds and owner[block] not in (rank, peer)
            ]
            assert set(relayed) == set(range(2 * ranks))
    case = Case(batch, plan, shape, 0)
    tensors = Tensors.draw(case)
    given_results = run_virtual(case, "default", tensors, kernel=ReferenceKernel(4))
    assert_equal(given_results, run_dense(case, "default", tensors, torch.float64), 1e-12)


@draws(60)
@given(case=cases(dtype="fp32"), kernel=KERNELS)
def test_fp32_results_are_as_close_to_fp64_as_fp32_can_be(case, kernel):
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64).tensors()
    dense = run_dense(case, "default", tensors, torch.float32).tensors()
    for name, value in run_virtual(case, "default", tensors, kernel=kernel).tensors().items():
        # If terms cancel out, dense attention in fp32 is no better.
        allowed = max(1e-5, 4 * relative_error(dense[name], expected[name]))
        assert relative_error(value, expected[name]) <= allowed, name


def short_sequences_case(seed: int, rows: int) -> Case:
    """Many sequences shorter than a kernel tile, with tiles on any rank and in any division."""
    lengths = [3, 5, 2, 7, 1, 4, 6, 3, 2, 5]
    batch = Batch.of([masks.causal(n) for n in lengths])
    shape = AttentionShape(4, 2, 8, "fp64")
    config = PlannerConfig(
        "random", block_size=2, head_groups=2, divisions=4, seed=seed, layout=Layout(rows)
    )
    return Case(batch, plan_batch(batch, Topology(1, 3), shape, config), shape, seed)


@pytest.mark.parametrize("rows", [4, 16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_short_sequences_share_kernel_tiles_while_their_tiles_run_elsewhere(seed, rows):
    case = short_sequences_case(seed, rows)
    tensors = Tensors.draw(case)
    given_results = run_virtual(case, "default", tensors, kernel=ReferenceKernel(rows))
    assert_equal(given_results, run_dense(case, "default", tensors, torch.float64), 1e-12)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("mask", ["causal", "lambda_shaped:sinks=16,window=200", "shared_question"])
def test_bf16_is_within_twice_the_error_of_plain_bf16_attention(kernel, mask):
    batch = Batch.of([masks.by_name(mask)(n) for n in (700, 61, 300)])
    shape = AttentionShape(4, 2, 64, "bf16")
    config = PlannerConfig("random", block_size=128, divisions=4)
    case = Case(batch, plan_batch(batch, Topology(1, 4), shape, config), shape, 0)
    tensors = Tensors.draw(case)
    exact = run_dense(case, "default", tensors, torch.float64).tensors()
    plain = run_dense(case, "default", tensors, torch.bfloat16).tensors()
    ours = run_virtual(case, "default", tensors, kernel=kernel).tensors()
    for name, expected in exact.items():
        allowed = 2 * (plain[name].double() - expected).abs().max()
        assert (ours[name].double() - expected).abs().max() <= allowed, name


def test_long_rows_with_many_kernel_pieces_are_exact():
    batch = Batch.of([masks.lambda_shaped(1500, sinks=7, window=400), masks.causal(777)])
    shape = AttentionShape(2, 1, 16, "fp64")
    case = Case(batch, plan_batch(batch, Topology(1, 3), shape), shape, 1)
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    assert_equal(run_virtual(case, "default", tensors), expected, 1e-12)
