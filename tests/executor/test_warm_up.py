"""Warming up: afterwards no batch compiles, and the executor is unchanged."""

import pytest
import torch

from cases import TORCH
from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    Layout,
    PlannerConfig,
    Topology,
    attention,
    masks,
    plan_batch,
)
from interpreted import needs_interpreter
from sizes import full, pick

MASKS = (
    masks.causal,
    lambda length: masks.lambda_shaped(length, sinks=20, window=150),
    masks.shared_question,
    masks.causal_blockwise,
    masks.full,
)
SHAPES = [
    AttentionShape(4, 2, 16, "bf16"),
    AttentionShape(2, 2, 32, "bf16", "fp32"),
    AttentionShape(3, 1, 24, "fp32"),
]


def draw_plan(shape, seed, ranks=4):
    lengths = torch.randint(1, 700, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    mask, solver = MASKS[seed % len(MASKS)], ("auto", "random", "zigzag")[seed % 3]
    config = PlannerConfig(solver, block_size=128, seed=seed, layout=Layout(128, 1))
    return plan_batch(Batch.of([mask(n) for n in lengths]), Topology(1, ranks), shape, config)


def run(executor, plan, shape, *, packed):
    step, dtype = executor.prepare(plan), TORCH[shape.dtype]
    q = torch.randn(step.num_rows, shape.q_heads, shape.head_dim).to(dtype).requires_grad_()
    kv = torch.randn(step.num_rows, 2, shape.kv_heads, shape.head_dim).to(dtype).requires_grad_()
    if packed:
        out = DCPAttn.apply(step, q, kv)
    else:
        out = attention(step, q, *(x.contiguous() for x in kv.unbind(1)))
    out.sum().backward()
    return out.detach()


@needs_interpreter
@pytest.mark.parametrize("shape", [SHAPES[1], *map(full, SHAPES[::2])], ids=str)
def test_no_batch_asks_for_a_kernel_that_is_not_compiled_yet(shape, monkeypatch):
    from dyncp.kernels.triton_kernel import TritonKernel
    from dyncp.kernels.triton_row_ops import TritonRowOps
    from variants import KERNELS, Variants

    variants = Variants(monkeypatch, KERNELS)
    executor = DCPExecutor(virtual_ranks=4, kernel=TritonKernel(), row_ops=TritonRowOps())
    executor.warm_up(shape)
    compiled = set(variants.seen)
    assert {name for name, *_ in compiled} == set(KERNELS)
    for seed in range(pick(5, 15)):
        run(executor, draw_plan(shape, seed), shape, packed=seed % 2 == 0)
    assert not variants.seen - compiled
    executor = DCPExecutor(kernel=TritonKernel(), row_ops=TritonRowOps())
    for seed in range(pick(2, 5)):
        run(executor, draw_plan(shape, seed, 1), shape, packed=seed % 2 == 0)
    assert not variants.seen - compiled


@pytest.mark.parametrize("kernel", ["cpu", full("reference")])
def test_the_executor_is_unchanged(kernel):
    shape = SHAPES[0]
    plan = draw_plan(shape, 1)
    plain, warm = (DCPExecutor(virtual_ranks=4, kernel=kernel) for _ in range(2))
    warm.warm_up(shape, head_groups=2)
    assert warm.transport.bytes_sent == 0
    assert warm.engine.arena().capacity == 0
    with pytest.raises(ValueError, match="attention before prepare"):
        _ = warm.latest
    torch.manual_seed(0)
    expected = run(plain, plan, shape, packed=True)
    torch.manual_seed(0)
    assert torch.equal(run(warm, plan, shape, packed=True), expected)
    assert warm.transport.bytes_sent == plain.transport.bytes_sent


def test_memory_is_reserved_for_sample_plans_with_room_to_spare():
    shape = SHAPES[0]
    plans = [draw_plan(shape, seed) for seed in (0, 1)]
    executor = DCPExecutor(virtual_ranks=4)
    reserved = executor.reserve(plans)
    needed = max(max(m.forward.sum(), m.backward.sum()) for m in (p.memory() for p in plans))
    assert reserved == int(1.25 * needed) == executor.engine.arena().capacity
    run(executor, plans[1], shape, packed=True)
    assert executor.engine.arena().capacity == reserved
    assert executor.reserve(plans[:1]) == reserved


def test_one_rank_reserves_what_the_largest_needs(monkeypatch):
    plan = draw_plan(SHAPES[0], 1)
    executor = DCPExecutor(virtual_ranks=4)
    monkeypatch.setattr(executor.transport, "ranks", (2,))
    assert executor.reserve([plan]) == int(1.25 * plan.memory().peak)
