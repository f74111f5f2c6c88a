"""The attention call: its options, several live plans, recomputation."""

import weakref
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dense import dense_attention, relative_error
from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    Plan,
    PlannerConfig,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.kernels import CpuKernel
from dyncp.plan import batch_order

SHAPE = AttentionShape(4, 2, 8, "fp64")
BATCH = Batch.of(
    [{"default": masks.causal(n), "local": masks.sliding_window(n, window=3)} for n in (20, 3, 11)]
)


def make_plan(seed: int = 0, batch: Batch = BATCH, **options: object) -> Plan:
    config = PlannerConfig("random", block_size=4, seed=seed, **options)
    return plan_batch(batch, Topology(1, 3), SHAPE, config)


def draw(seed: int, tokens: int, *heads: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, *heads, 8, generator=rng, dtype=torch.float64)


def in_batch_order(plan: Plan, rows: Tensor) -> Tensor:
    return rows[torch.from_numpy(batch_order(plan.parts[0]))]


def dense(plan: Plan, q: Tensor, k: Tensor, v: Tensor, name: str = "default", **options) -> Tensor:
    """Dense attention of local rows, in batch order."""
    rows = (in_batch_order(plan, x) for x in (q, k, v))
    return dense_attention(BATCH, name, *rows, scale=options.pop("scale", 8**-0.5), **options)


def test_calls_may_have_another_dtype_than_the_plan_assumes():
    executor = DCPExecutor(virtual_ranks=3)
    config = PlannerConfig("random", block_size=4, head_groups=2)
    for dtype in ("bf16", "fp32"):
        assumed = AttentionShape(4, 2, 8, dtype)
        plan = plan_batch(BATCH, Topology(1, 3), assumed, config)
        step = executor.prepare(plan)
        q, k, v = (draw(i, 34, heads).requires_grad_() for i, heads in enumerate((4, 2, 2)))
        out, expected = attention(step, q, k, v), dense(plan, q, k, v)
        assert relative_error(in_batch_order(plan, out), expected) < 1e-12
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
        assert all(relative_error(*pair) < 1e-12 for pair in zip(grads, wanted, strict=True))
        laid_out = executor.prepare(plan).prepared._layouts  # now for the dtype of the calls
        assert {shape.dtype for _, _, shape in laid_out} == {"fp64"}


def test_dcpattn_takes_packed_kv_and_its_gradient_is_packed():
    plan = make_plan()
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    q, kv = draw(0, 34, 4).requires_grad_(), draw(1, 34, 2, 2).requires_grad_()
    out = DCPAttn.apply(step, q, kv)
    grads = torch.autograd.grad(out.square().sum(), (q, kv))
    expected = dense(plan, q, kv[:, 0], kv[:, 1])
    wanted = torch.autograd.grad(expected.square().sum(), (q, kv))
    assert relative_error(in_batch_order(plan, out), expected) < 1e-12
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(grads, wanted, strict=True))


def test_masks_are_chosen_by_name():
    plan = make_plan()
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    q, k, v = draw(0, 34, 4), draw(1, 34, 2), draw(2, 34, 2)
    for name in ("default", "local"):
        out = attention(step, q, k, v, mask=name)
        assert relative_error(in_batch_order(plan, out), dense(plan, q, k, v, name)) < 1e-12


def test_scale_and_sink_change_the_softmax_and_have_gradients():
    plan = make_plan()
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    inputs = [draw(i, 34, heads).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out = attention(step, *inputs, scale=0.7, sink=sink)
    expected = dense(plan, *inputs, scale=0.7, sink=sink)
    assert relative_error(in_batch_order(plan, out), expected) < 1e-12
    grads = torch.autograd.grad(out.square().sum(), (*inputs, sink))
    wanted = torch.autograd.grad(expected.square().sum(), (*inputs, sink))
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(grads, wanted, strict=True))


def test_rows_that_attend_nothing_give_zero_and_no_gradient():
    batch = Batch.of([masks.Mask(torch.zeros(6, 1, 2).int().numpy()), masks.causal(4)])
    plan = plan_batch(batch, Topology(1, 2), SHAPE, PlannerConfig("random", block_size=2))
    step = DCPExecutor(virtual_ranks=2).prepare(plan)
    q, kv = draw(0, 10, 4).requires_grad_(), draw(1, 10, 2, 2).requires_grad_()
    out = DCPAttn.apply(step, q, kv)
    out.sum().backward()
    assert (in_batch_order(plan, out)[:6] == 0).all()
    assert (in_batch_order(plan, q.grad)[:6] == 0).all()
    assert torch.isfinite(kv.grad).all()


def test_inputs_need_not_be_contiguous():
    plan = make_plan()
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    q, kv = draw(0, 34, 4), draw(1, 34, 2, 2)
    strided_q = q.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    strided_kv = kv.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert not strided_q.is_contiguous()
    assert not strided_kv.is_contiguous()
    same = DCPAttn.apply(step, strided_q, strided_kv)
    assert relative_error(same, DCPAttn.apply(step, q, kv)) < 1e-12


def test_the_same_plan_and_inputs_give_the_same_bits():
    step = DCPExecutor(virtual_ranks=3).prepare(make_plan())
    runs = []
    for _ in range(2):
        q, kv = draw(0, 34, 4).float(), draw(1, 34, 2, 2).float()
        q, kv = q.double().requires_grad_(), kv.double().requires_grad_()
        out = DCPAttn.apply(step, q, kv)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, kv))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_backward_uses_the_plan_of_its_own_forward():
    executor = DCPExecutor(virtual_ranks=3)
    plans = [make_plan(seed) for seed in range(3)]
    q, kv = draw(0, 34, 4).requires_grad_(), draw(1, 34, 2, 2).requires_grad_()
    outs = [DCPAttn.apply(executor.prepare(plan), q, kv) for plan in plans]
    for plan, out in zip(plans, outs, strict=True):
        grads = torch.autograd.grad(out.square().sum(), (q, kv))
        wanted = torch.autograd.grad(dense(plan, q, kv[:, 0], kv[:, 1]).square().sum(), (q, kv))
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_recompute_under_their_own_handle(reentrant):
    executor = DCPExecutor(virtual_ranks=3)
    plans = [make_plan(seed) for seed in range(2)]
    q, kv = draw(0, 34, 4).requires_grad_(), draw(1, 34, 2, 2).requires_grad_()
    losses = []
    for plan in plans:
        step = executor.prepare(plan)
        out = checkpoint(DCPAttn.apply, step, q, kv, use_reentrant=reentrant)
        losses.append(out.square().sum())
    for plan, loss in zip(plans, losses, strict=True):
        q.grad = kv.grad = None
        loss.backward()
        wanted = torch.autograd.grad(dense(plan, q, kv[:, 0], kv[:, 1]).square().sum(), (q, kv))
        assert relative_error(q.grad, wanted[0]) < 1e-12
        assert relative_error(kv.grad, wanted[1]) < 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_through_the_executor_raises_instead_of_guessing_the_plan(reentrant):
    executor = DCPExecutor(virtual_ranks=3)
    q, kv = draw(0, 34, 4).requires_grad_(), draw(1, 34, 2, 2).requires_grad_()
    step = executor.prepare(make_plan(0))
    out = checkpoint(DCPAttn.apply, executor, q, kv, use_reentrant=reentrant)
    assert torch.equal(out, DCPAttn.apply(step, q, kv))
    with pytest.raises(ValueError, match="pass the handle"):
        out.sum().backward()


def test_nothing_keeps_a_step_whose_calls_are_through():
    executor = DCPExecutor(virtual_ranks=3)
    q, kv = draw(0, 34, 4).requires_grad_(), draw(1, 34, 2, 2).requires_grad_()
    steps = []
    for seed in range(3):
        step = executor.prepare(make_plan(seed))
        steps.append(weakref.ref(step.prepared))
        checkpoint(DCPAttn.apply, step, q, kv, use_reentrant=False).sum().backward()
        with torch.no_grad():
            DCPAttn.apply(executor, q, kv)
    del step
    assert [alive() is None for alive in steps] == [True, True, False]  # the latest is kept


class OwnCheckpoint(torch.autograd.Function):
    """Recomputes in backward, as other libraries' checkpointing does."""

    @staticmethod
    def forward(ctx, function, q, kv):
        ctx.function = function
        ctx.save_for_backward(q, kv)
        return function(q, kv)

    @staticmethod
    def backward(ctx, dout):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        return None, *torch.autograd.grad(out, inputs, dout)


def test_recomputation_by_other_libraries_needs_the_handle():
    executor = DCPExecutor(virtual_ranks=3)
    plan = make_plan(0)
    step = executor.prepare(plan)
    q, kv = draw(0, 34, 4).requires_grad_(), draw(1, 34, 2, 2).requires_grad_()
    out = OwnCheckpoint.apply(partial(DCPAttn.apply, step), q, kv)
    executor.prepare(make_plan(1))
    grads = torch.autograd.grad(out.square().sum(), (q, kv))
    wanted = torch.autograd.grad(dense(plan, q, kv[:, 0], kv[:, 1]).square().sum(), (q, kv))
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(grads, wanted, strict=True))
    out = OwnCheckpoint.apply(partial(DCPAttn.apply, executor), q, kv)
    with pytest.raises(ValueError, match="pass the handle"):
        out.sum().backward()


def test_the_executor_itself_means_its_latest_handle():
    executor = DCPExecutor(virtual_ranks=3)
    q, kv = draw(0, 34, 4), draw(1, 34, 2, 2)
    for seed in range(2):
        step = executor.prepare(make_plan(seed))
        assert torch.equal(DCPAttn.apply(executor, q, kv), DCPAttn.apply(step, q, kv))


def test_a_plan_without_a_model_shape_fits_any_heads_and_dtype():
    plan = plan_batch(BATCH, Topology(1, 3), planner=PlannerConfig("random", block_size=4))
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    for q_heads, kv_heads, dtype in ((2, 1, torch.float64), (6, 6, torch.bfloat16)):
        q, k = (torch.randn(34, h, 8, dtype=dtype) for h in (q_heads, kv_heads))
        out = attention(step, q, k, k)
        expected = dense(plan, q.double(), k.double(), k.double())
        assert relative_error(in_batch_order(plan, out), expected) < 2e-2


def test_partial_results_can_travel_wider_than_the_inputs():
    wide = AttentionShape(4, 2, 8, "bf16", partial_dtype="fp32")
    narrow = AttentionShape(4, 2, 8, "bf16")
    sent = []
    for shape in (narrow, wide):
        plan = plan_batch(BATCH, Topology(1, 3), shape, PlannerConfig("random", block_size=4))
        executor = DCPExecutor(virtual_ranks=3)
        step = executor.prepare(plan)
        DCPAttn.apply(step, draw(0, 34, 4).bfloat16(), draw(1, 34, 2, 2).bfloat16())
        assert executor.transport.bytes_sent == plan.parts[0].declared_bytes["default"][0]
        sent.append(executor.transport.bytes_sent)
    assert sent[1] > sent[0]


def test_a_forward_only_plan_evaluates_and_refuses_gradients():
    plan = make_plan(forward_only=True)
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    q, kv = draw(0, 34, 4), draw(1, 34, 2, 2)
    assert (
        relative_error(
            in_batch_order(plan, DCPAttn.apply(step, q, kv)), dense(plan, q, kv[:, 0], kv[:, 1])
        )
        < 1e-12
    )
    with pytest.raises(ValueError, match="made for evaluation"):
        DCPAttn.apply(step, q.requires_grad_(), kv)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e25, 0.0])
def test_gradients_are_as_exact_for_tiny_and_huge_output_gradients(size):
    plan = plan_batch(BATCH, Topology(1, 3), planner=PlannerConfig("random", block_size=4))
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    q, kv = (x.float().requires_grad_() for x in (draw(0, 34, 4), draw(1, 34, 2, 2)))
    dout = (draw(2, 34, 4) * size).float()
    grads = torch.autograd.grad(DCPAttn.apply(step, q, kv), (q, kv), dout)
    wide_q, wide_kv = (x.detach().double().requires_grad_() for x in (q, kv))
    expected = dense(plan, wide_q, wide_kv[:, 0], wide_kv[:, 1])
    wanted = torch.autograd.grad(expected, (wide_q, wide_kv), in_batch_order(plan, dout).double())
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(grads, wanted, strict=True))


class FailingOnce(CpuKernel):
    """Fails in its third kernel call, while messages are in flight."""

    calls = 0

    def attend(self, *arguments: object) -> None:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("out of memory")
        super().attend(*arguments)


def test_a_call_that_fails_leaves_nothing_behind_for_the_next_one():
    plan = make_plan()
    step = DCPExecutor(virtual_ranks=3, kernel=FailingOnce()).prepare(plan)
    q, kv = draw(0, 34, 4), draw(1, 34, 2, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        DCPAttn.apply(step, q, kv)
    expected = dense(plan, q, kv[:, 0], kv[:, 1])
    assert relative_error(in_batch_order(plan, DCPAttn.apply(step, q, kv)), expected) < 1e-12
