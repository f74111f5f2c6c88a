"""Plan.memory predicts the bytes that the executor's calls take."""

import numpy as np
import pytest
import torch
from hypothesis import given

from cases import Case, Tensors, cases
from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    PlannerConfig,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.executor.kernel_calls import style_of
from dyncp.kernels import Kernel, ReferenceKernel
from dyncp.plan import KernelStyle, Layout
from dyncp.plan.buffers import GRAPH_BYTES
from kernel_styles import CollectingReference, RoundingKernel
from sizes import draws, full

LAUNCH_AND_WAIT = 2
KERNELS = [ReferenceKernel(), RoundingKernel(), CollectingReference()]


def taken(case: Case, name: str, kernel: Kernel) -> list[int]:
    """Bytes that all ranks together take from the arena, forward and backward."""
    executor = DCPExecutor(virtual_ranks=case.plan.num_ranks, kernel=kernel)
    step = executor.prepare(case.plan)
    tensors = Tensors.draw(case)
    rows = torch.zeros(step.num_rows, dtype=torch.int64)
    q, k, v = (x[rows].clone().requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    out = attention(step, q, k, v, mask=name)
    forward = executor.engine.arena().used
    out.sum().backward()
    return [forward, executor.engine.arena().used]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [full("fp32"), "bf16"])
@draws(25)
@given(case=cases())
def test_the_estimate_is_what_the_executor_takes(dtype, kernel, case):
    shape = AttentionShape(case.shape.q_heads, case.shape.kv_heads, case.shape.head_dim, dtype)
    layout = Layout(64) if kernel.collects else Layout()
    config = PlannerConfig("random", block_size=7, seed=case.seed, divisions=3, layout=layout)
    plan = plan_batch(case.batch, Topology(1, case.plan.num_ranks), shape, config)
    calls = [taken(Case(case.batch, plan, shape, 0), name, kernel) for name in case.batch.masks]
    memory = plan.memory(style=style_of(kernel))
    largest = np.max(calls, axis=0)
    if len(calls) == 1:
        assert largest.tolist() == [memory.forward.sum(), memory.backward.sum()]
    else:  # ranks may have their largest calls for different masks
        assert largest[0] <= memory.forward.sum()
        assert largest[1] <= memory.backward.sum()


@draws(40)
@given(case=cases(num_ranks=1))
def test_one_rank_takes_only_the_row_sums_and_log_sum_exps_of_backward(case):
    forward, backward = taken(case, "default", ReferenceKernel())
    assert forward == 0
    groups = case.plan.parts[0].head_groups
    repeat, rows = case.shape.q_heads_per_kv_head, case.plan.parts[0].local_rows
    padded = -(-rows // 128) * 128
    sums = [2 * 8 * padded * group.num_kv_heads * repeat for group in groups]
    if len(case.plan.parts[0].masks["default"].backward.instructions):
        assert backward == sum(sums)


def test_by_hand_with_one_transfer():
    """Ranks 0 and 1 own 16 tokens each; rank 1 gets the keys of rank 0 and merges two calls."""
    shape = AttentionShape(2, 1, 16, "bf16")
    config = PlannerConfig("zigzag", block_size=16, layout=Layout(16))
    plan = plan_batch(Batch.of([masks.full(32)]), Topology(1, 2), shape, config)
    keys, queries = 32 * 16 * 2, 16 * 2 * 16
    messages = 2 * (2 * 16 * 16 * 2)
    forward = 2 * keys + queries * 4 + messages
    assert plan.memory().forward.tolist() == [forward, forward]


def test_a_plan_for_any_shape_says_the_bytes_of_a_given_one():
    batch = Batch.of([masks.causal(300)])
    plan = plan_batch(batch, Topology(1, 2))
    small, wide = AttentionShape(8, 8, 16, "fp32"), AttentionShape(16, 16, 16, "fp32")
    assert plan.memory(wide).forward.sum() == pytest.approx(
        2 * plan.memory(small).forward.sum(), rel=0.02
    )
    assert plan.memory().peak == plan.memory(plan.parts[0].shape).peak


def test_a_kernel_that_collects_takes_sums_of_its_own():
    plan = plan_batch(Batch.of([masks.causal(256)]), Topology(), AttentionShape(2, 1, 72, "bf16"))
    style = KernelStyle(collects=True, row_multiple=128, dim_multiple=16)
    plain, collecting = plan.memory(), plan.memory(style=style)
    assert collecting.backward[0] - plain.backward[0] == 256 * 4 * 80 * 4
    assert collecting.forward[0] == plain.forward[0]


def test_fixed_addresses_take_room_for_all_inputs_where_there_are_messages():
    """Rank 1 needs the keys of rank 0; its queries stay where they are."""
    shape = AttentionShape(2, 1, 16, "bf16")
    config = PlannerConfig("zigzag", block_size=16, layout=Layout(16))
    batch = Batch.of([masks.full(32)])
    plan = plan_batch(batch, Topology(1, 2), shape, config)
    fixed, free = (plan.memory(style=KernelStyle(fixed=x)).forward for x in (True, False))
    # q, out and log-sum-exps, which have whole kernel tiles of rows.
    assert (fixed - free).tolist() == [2 * 16 * 2 * 16 * 2 + 2 * 128 * 4] * 2
    assert plan.memory().graphs.tolist() == [0, 0]
    points = [2 * (LAUNCH_AND_WAIT + 1)] * 2  # forward, and backward with as many phases or more
    graphs = plan.memory(style=KernelStyle(fixed=True)).graphs
    assert (graphs >= GRAPH_BYTES * np.asarray(points)).all()
    alone = plan_batch(batch, Topology(), shape)
    assert not alone.memory(style=KernelStyle(fixed=True)).graphs.any()
    assert alone.memory(style=KernelStyle(fixed=True)).peak == alone.memory().peak


def test_a_plan_for_evaluation_has_no_backward():
    config = PlannerConfig(forward_only=True)
    plan = plan_batch(Batch.of([masks.causal(100)]), Topology(1, 2), planner=config)
    memory = plan.memory()
    assert memory.backward.tolist() == [0, 0]
    assert memory.peak == memory.forward.max()
