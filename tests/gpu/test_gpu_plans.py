"""Whole plans on virtual ranks of one GPU, against dense attention in fp64."""

import pytest
import torch
from gpu_cases import KERNELS, MASKS, Tensors, batch_of, dense, error, needs, plan_of, run

from dyncp import AttentionShape, DCPExecutor, attention
from dyncp.plan import Layout

SHAPE = AttentionShape(8, 2, 128, "bf16")
SOLVERS = ("rows", "bisection", "random", "zigzag", "whole_documents")


def check(batch, plan, shape, kernel, deterministic, dtype=torch.bfloat16, factor=1.5):
    """Errors at most 1.5 times those of a plain attention in the same dtype."""
    tensors, scale = Tensors.draw(batch, shape, dtype), shape.head_dim**-0.5
    executor = DCPExecutor(
        virtual_ranks=plan.num_ranks, device="cuda", kernel=kernel, deterministic=deterministic
    )
    exact = dense(batch, tensors, scale, torch.float64)
    plain = dense(batch, tensors, scale, dtype)
    found = run(executor, plan, tensors, scale)
    for name, mine, theirs, true in zip(
        ("out", "dq", "dk", "dv"), found, plain, exact, strict=True
    ):
        assert error(mine, true) <= factor * error(theirs, true), name
    return executor, tensors, found


@pytest.mark.parametrize(("kernel", "deterministic"), KERNELS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_any_placement_is_exact(kernel, deterministic, solver):
    needs(kernel)
    batch = batch_of("causal")
    plan = plan_of(batch, SHAPE, 4, solver, block_size=200, divisions=3)
    check(batch, plan, SHAPE, kernel, deterministic)


@pytest.mark.parametrize(("kernel", "deterministic"), KERNELS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_any_mask_is_exact(kernel, deterministic, mask, ranks):
    needs(kernel)
    batch = batch_of(mask)
    plan = plan_of(batch, SHAPE, ranks, "random", block_size=300, divisions=3)
    check(batch, plan, SHAPE, kernel, deterministic)


@pytest.mark.parametrize(("kernel", "deterministic"), KERNELS)
@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 4, 64, "bf16"),
        AttentionShape(6, 2, 96, "fp16"),
        AttentionShape(4, 1, 128, "fp16"),
    ],
    ids=str,
)
def test_heads_and_dims(kernel, deterministic, shape):
    needs(kernel)
    batch = batch_of("lambda")
    dtype = torch.bfloat16 if shape.dtype == "bf16" else torch.float16
    plan = plan_of(batch, shape, 4, "rows", block_size=300, divisions=3)
    check(batch, plan, shape, kernel, deterministic, dtype)


@pytest.mark.parametrize(
    ("dim", "dtype"), [(256, "bf16"), (72, "bf16"), (64, "fp32"), (128, "fp32")]
)
def test_triton_takes_other_dims_and_fp32(dim, dtype):
    needs("triton")
    shape = AttentionShape(4, 2, dim, dtype)
    batch = batch_of("shared")
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    plan = plan_of(batch, shape, 4, "random", block_size=300, divisions=3)
    check(batch, plan, shape, "triton", True, torch_dtype, factor=2.0 if dtype == "fp32" else 1.5)


@pytest.mark.parametrize(("kernel", "deterministic"), KERNELS)
def test_head_groups_on_their_own_ranks(kernel, deterministic):
    needs(kernel)
    shape = AttentionShape(8, 4, 64, "bf16")
    batch = batch_of("causal")
    plan = plan_of(batch, shape, 4, "random", block_size=300, divisions=3, head_groups=2)
    check(batch, plan, shape, kernel, deterministic)


@pytest.mark.parametrize("kernel", ["triton", "flash4"])
def test_the_same_bits_every_time(kernel):
    needs(kernel)
    batch = batch_of("lambda")
    plan = plan_of(batch, SHAPE, 4, "bisection", block_size=200)
    executor, tensors, first = check(batch, plan, SHAPE, kernel, True)
    for _ in range(3):
        again = run(executor, plan, tensors, SHAPE.head_dim**-0.5)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("kernel", "deterministic"), KERNELS)
def test_nothing_is_allocated_after_the_first_layer(kernel, deterministic):
    needs(kernel)
    batch = batch_of("causal")
    plan = plan_of(batch, SHAPE, 4, "rows", block_size=200)
    executor = DCPExecutor(
        virtual_ranks=4, device="cuda", kernel=kernel, deterministic=deterministic
    )
    step = executor.prepare(plan)
    q, k, v = (
        torch.randn(step.num_rows, h, 128, device="cuda").bfloat16().requires_grad_()
        for h in (8, 2, 2)
    )

    def layer():
        out = attention(step, q, k, v)
        out.backward(q.detach())
        torch.cuda.synchronize()

    layer()
    layer()
    before = torch.cuda.memory_stats()
    layer()
    after = torch.cuda.memory_stats()
    assert after["num_device_alloc"] == before["num_device_alloc"]
    # out, lse, their gradients and what autograd itself needs; no workspaces, no messages
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] <= 8


def test_slots_that_do_not_start_on_kernel_tiles_are_refused_by_flash4():
    needs("flash4")
    batch = batch_of("causal")
    plan = plan_of(batch, SHAPE, 4, "random", block_size=200, layout=Layout(8))
    executor = DCPExecutor(virtual_ranks=4, device="cuda", kernel="flash4")
    with pytest.raises(ValueError, match="needs multiples of 128"):
        executor.prepare(plan)
