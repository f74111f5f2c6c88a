"""Kernel `flash4` with flash-attn-4's kernels emulated; everything else is the real code."""

import pytest
import torch
from flash4_emulated import import_flash4

from cases import Case, Tensors, assert_equal, run_dense, run_virtual
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
from dyncp.executor.engine import Engine
from dyncp.kernels import CpuKernel, choose
from dyncp.plan import Layout
from interpreted import needs_interpreter
from sizes import full

pytestmark = needs_interpreter
MASKS = {
    "causal": masks.causal,
    "lambda": lambda length: masks.lambda_shaped(length, sinks=20, window=100),
    "shared": masks.shared_question,
}


def kernel(deterministic):
    return import_flash4().Flash4Kernel(deterministic=deterministic)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("solver", ["owner_computes", full("bisection"), "random", full("uncut")])
@pytest.mark.parametrize("shape", [(2, 1, 32), (2, 2, 40)], ids=["grouped", "plain"])
def test_plans_are_exact(mask, solver, shape):
    batch = Batch.of([MASKS[mask](length) for length in (400, 65, 129, 1)])
    shape = AttentionShape(*shape, "bf16")
    config = PlannerConfig(solver, block_size=90, divisions=3)
    plan = plan_batch(batch, Topology(2, 2), shape, config)
    case = Case(batch, plan, shape, 3)
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    given = run_virtual(case, "default", tensors, kernel=kernel(False))
    assert_equal(given, expected, 2e-2)


@pytest.mark.parametrize("solver", ["ulysses", "owner_computes", "zigzag"])
def test_received_sequences_and_results_in_fp32_are_exact(solver):
    """Ranks receive whole sequences from others."""
    batch = Batch.of([masks.causal(length) for length in (256, 300, 200, 200)])
    shape = AttentionShape(4, 2, 32, "bf16", "fp32")
    config = PlannerConfig(solver, block_size=256, divisions=4, layout=Layout(128, 1))
    case = Case(batch, plan_batch(batch, Topology(1, 4), shape, config), shape, 3)
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    assert_equal(run_virtual(case, "default", tensors, kernel=kernel(False)), expected, 2e-2)


def test_one_rank_runs_several_sequences_as_varlen():
    batch = Batch.of([masks.causal(length) for length in (300, 65, 129, 1)])
    shape = AttentionShape(4, 2, 32, "bf16")
    case = Case(batch, plan_batch(batch, Topology(1, 1), shape), shape, 3)
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    assert_equal(run_virtual(case, "default", tensors, kernel=kernel(False)), expected, 2e-2)


def test_the_use_of_triton_for_backward_is_logged_once(caplog):
    import_flash4()
    choose._log_once.cache_clear()
    with caplog.at_level("INFO", "dyncp.kernels.choose"):
        assert choose._make("flash4", deterministic=False).collects
        assert not caplog.records
        for _ in range(2):
            assert not choose._make("flash4", deterministic=True).collects
    assert caplog.text.count("forward by flash-attn-4, backward by 'triton'") == 1


def test_another_kernel_takes_inputs_that_flash4_refuses_if_there_is_one(caplog):
    batch = Batch.of([masks.causal(50)])
    executor = DCPExecutor(kernel=kernel(True))
    step = executor.prepare(plan_batch(batch, Topology(1, 1)))
    q, k = torch.randn(50, 4, 32), torch.randn(50, 2, 32)
    with pytest.raises(ValueError, match=r"takes bf16 and fp16 and head dims from 16 to 128"):
        attention(step, q, k, k)
    engine = executor.engine
    engine.alternative = Engine(CpuKernel(), engine.transport, engine.device, engine.row_ops)
    plain = DCPExecutor(kernel="cpu").prepare(plan_batch(batch, Topology(1, 1)))
    assert torch.equal(attention(step, q, k, k), attention(plain, q, k, k))
    attention(step, q, k, k)
    assert caplog.text.count("kernel 'cpu' takes over: kernel 'flash4' takes") == 1


@pytest.mark.parametrize("deterministic", [full(False), True])
def test_after_warming_up_no_batch_compiles(deterministic, monkeypatch):
    from dyncp.kernels.triton_row_ops import TritonRowOps

    shape, seen = AttentionShape(4, 2, 32, "bf16"), record_variants(monkeypatch)
    chosen = {"kernel": kernel(deterministic), "row_ops": TritonRowOps()}
    executors = [DCPExecutor(virtual_ranks=ranks, **chosen) for ranks in (1, 3)]
    executors[0].warm_up(shape, most_ranges=32)
    compiled = set(seen)
    for seed, mask in enumerate([*MASKS.values(), masks.causal, masks.causal]):
        lengths = [(400, 65, 129, 1), (700,), (150, 3, 140), (300, 300), (290, 20)][seed]
        batch = Batch.of([mask(length) for length in lengths])
        for executor, solver in zip(executors, ("auto", "owner_computes"), strict=True):
            ranks = Topology(1, executor.transport.num_ranks)
            step = executor.prepare(plan_batch(batch, ranks, shape, PlannerConfig(solver)))
            q = torch.zeros(step.num_rows, 4, 32, dtype=torch.bfloat16, requires_grad=True)
            k = torch.zeros(step.num_rows, 2, 32, dtype=torch.bfloat16, requires_grad=True)
            attention(step, q, k, k).sum().backward()
    assert seen == compiled


def record_variants(monkeypatch):
    """The set of kernel variants that are requested from now on. None of them runs."""
    from variants import KERNELS, Variants

    flash = import_flash4().flash
    variants = Variants(monkeypatch, KERNELS)

    def recorder(name, inputs_and_shape):
        def record(*args):
            q, k, shape = inputs_and_shape(*args)
            of_heads = (q.shape[1:], k.shape[1])
            variants.seen.add((name, *of_heads, *flash.variant_of(q, k, shape)))

        return record

    backward = recorder("backward", lambda inputs, *rest: (*inputs[:2], rest[4]))
    monkeypatch.setattr(flash, "attend", recorder("forward", lambda *args: (*args[:2], args[4])))
    monkeypatch.setattr(flash, "attend_backward", backward)
    return variants.seen


@pytest.mark.parametrize("shape", [(4, 2, 40), (2, 2, 40)], ids=["grouped", "plain"])
def test_a_call_uses_the_predicted_memory(shape):
    batch = Batch.of([masks.lambda_shaped(300, sinks=20, window=100)])
    shape = AttentionShape(*shape, "bf16")
    case = Case(batch, plan_batch(batch, Topology(1, 1), shape), shape, 3)
    executor = DCPExecutor(kernel=kernel(False))
    step = executor.prepare(case.plan)
    tensors = Tensors.draw(case)
    q, k, v = (x.requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    attention(step, q, k, v).backward(tensors.dout)
    assert executor.engine.arena().used == step.memory().backward[0]
