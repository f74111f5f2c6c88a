"""A kernel is compared with dense attention before its first use, and not used if it is wrong."""

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.executor.engine import Engine, WrongResultsError
from dyncp.executor.warm_up import check_kernel
from dyncp.kernels import CpuKernel
from dyncp.plan import causal, sample_plan, sample_ring
from dyncp.transport import InProcess
from dyncp.verify import verify_plan

SHAPE = AttentionShape(4, 2, 16, "fp32")


class Wrong(CpuKernel):
    """Computes wrong results for the last rows of one tensor."""

    name = "wrong"

    def __init__(self, where):
        self.where = where

    def attend(self, lowered, q, k, v, scale, out, lse):
        super().attend(lowered, q, k, v, scale, out, lse)
        if self.where == "out":
            out.final[-200:] = 0

    def attend_backward(self, lowered, inputs, scale, grads):
        super().attend_backward(lowered, inputs, scale, grads)
        if self.where != "out":
            getattr(grads, self.where).final[-200:] *= 2


def engine_of(kernel):
    executor = DCPExecutor(kernel=kernel)
    executor.engine.check = check_kernel
    return executor.engine


def test_a_right_kernel_passes():
    check_kernel(engine_of("cpu"), SHAPE)


@pytest.mark.parametrize("where", ["out", "dq", "dk", "dv"])
def test_a_wrong_kernel_is_named_with_its_shape_and_what_is_wrong(where):
    name = rf"kernel 'wrong' is wrong here for 4 q heads.* of {where} on 1 rank "
    with pytest.raises(WrongResultsError, match=name):
        check_kernel(engine_of(Wrong(where)), SHAPE)


def test_a_wrong_kernel_is_refused_on_first_use_or_replaced_where_the_choice_was_free(caplog):
    plan = plan_batch(Batch.of([masks.causal(50)]), Topology(1, 1))
    executor = DCPExecutor(kernel=Wrong("dq"))
    executor.engine.check = check_kernel
    q, k = torch.randn(50, 4, 16), torch.randn(50, 2, 16)
    with pytest.raises(ValueError, match="it is not used"):
        attention(executor.prepare(plan), q, k, k)
    engine = executor.engine
    engine.alternative = Engine(CpuKernel(), engine.transport, engine.device, engine.row_ops)
    plain = DCPExecutor(kernel="cpu").prepare(plan)
    assert torch.equal(attention(executor.prepare(plan), q, k, k), attention(plain, q, k, k))
    assert "kernel 'cpu' takes over: kernel 'wrong' is wrong here" in caplog.text


def test_warming_up_raises_where_no_kernel_is_right():
    with pytest.raises(ValueError, match="kernel 'wrong' is wrong here"):
        DCPExecutor(kernel=Wrong("dv")).warm_up(SHAPE)


def test_checks_send_nothing_over_the_executors_transport():
    executor = DCPExecutor(virtual_ranks=3)
    executor.warm_up(SHAPE, most_ranges=2)
    assert executor.transport.bytes_sent == 0
    assert isinstance(executor.transport, InProcess)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sample_plans_are_right_and_move_everything_that_plans_can(ranks):
    mask = [causal(700), causal(100)]
    plan = sample_plan(mask, ranks, SHAPE, 256)
    assert verify_plan(plan, Batch.of(mask)) == []
    if ranks > 1:
        kinds = {int(k) for part in plan.parts for k in part.masks["default"].backward.sends.kind}
        assert len(kinds) == 4  # keys and queries, and their gradients


def test_slots_of_a_sample_ring_get_several_blocks():
    mask = [causal(600)]
    plan = sample_ring(mask, 4, SHAPE, 150)
    assert verify_plan(plan, Batch.of(mask)) == []
    slots = [part.masks["default"].backward.slots for part in plan.parts]
    assert any(len(set(slot.row.tolist())) < len(slot) for slot in slots)


def test_checks_do_not_mind_what_the_caller_is_in(caplog):
    engine, shape = engine_of("cpu"), AttentionShape(2, 2, 16, "fp32")
    with (
        caplog.at_level("INFO", "dyncp.executor.warm_up"),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        check_kernel(engine, shape)
        check_kernel(engine, shape)
        DCPExecutor().warm_up(shape, most_ranges=1)
    assert caplog.text.count("compared with dense attention before its first use") == 1


def save_products(_context, operator, *_, **__):
    products = (torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "options",
    [{}, {"context_fn": lambda: create_selective_checkpoint_contexts(save_products)}],
    ids=["whole", "selective"],
)
def test_the_first_use_may_be_in_a_layer_that_is_checkpointed(options):
    """The check is not part of the layer, which is recomputed without it."""
    plan = plan_batch(Batch.of([masks.causal(50)]), Topology(1, 1))
    x, weight = torch.randn(50, 64), torch.randn(64, 128)
    grads = []
    for heads in (
        len(options) + 5,
        len(options) + 5,
    ):  # not yet checked in this process, then checked
        executor = DCPExecutor(kernel="cpu")
        executor.engine.check = check_kernel
        step, given = executor.prepare(plan), x.clone().requires_grad_()

        def layer(x, step=step, heads=heads):
            q, k = (x @ weight).split(64, dim=1)
            q, k = (y[:, None].expand(-1, heads, -1) for y in (q, k))
            return torch.tanh(attention(step, q, k, k).sum(1) @ weight)

        checkpoint(layer, given, use_reentrant=False, **options).sum().backward()
        grads.append(given.grad)
    assert torch.equal(*grads)
