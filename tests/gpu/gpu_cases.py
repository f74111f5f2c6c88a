"""Batches, plans and dense references on a GPU."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

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
from dyncp.kernels.choose import why_not
from dyncp.plan import batch_order

LENGTHS = (700, 129, 1, 65, 1900, 256, 40)
MASKS = {
    "causal": masks.causal,
    "full": masks.full,
    "lambda": lambda length: masks.lambda_shaped(length, sinks=20, window=300),
    "shared": masks.shared_question,
    "blockwise": lambda length: masks.causal_blockwise(length, block=64),
    "window": lambda length: masks.sliding_window(length, window=200),
}
KERNELS = (("triton", True), ("flash4", True), ("flash4", False))


def needs(kernel: str) -> None:
    missing = why_not(kernel, torch.device("cuda"))
    if missing:
        pytest.skip(missing)


def batch_of(mask: str, lengths=LENGTHS) -> Batch:
    return Batch.of([MASKS[mask](length) for length in lengths])


@dataclass(frozen=True)
class Tensors:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @staticmethod
    def draw(batch: Batch, shape: AttentionShape, dtype: torch.dtype, seed: int = 0) -> "Tensors":
        generator = torch.Generator("cuda").manual_seed(seed)
        tokens = int(batch.offsets[-1])
        return Tensors(*(
            torch.randn(tokens, h, shape.head_dim, device="cuda", generator=generator).to(dtype)
            for h in (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
        ))  # fmt: skip


def dense(batch: Batch, tensors: Tensors, scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, everything computed in `dtype`."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    repeat, out = q.shape[1] // k.shape[1], []
    for index, mask in enumerate(batch.masks["default"]):
        rows = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        keys, values = (x[rows].repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        scores = scores.masked_fill(~torch.from_numpy(mask.dense()).cuda(), -torch.inf)
        weights = torch.softmax(scores.to(torch.promote_types(dtype, torch.float32)), -1).to(dtype)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
    out = torch.cat(out)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors.dout.to(dtype))]


def run(executor: DCPExecutor, plan, tensors: Tensors, scale: float) -> list[Tensor]:
    """Output and gradients of a plan, tokens in batch order."""
    step = executor.prepare(plan)
    row = torch.from_numpy(batch_order(plan.parts[0])).cuda()

    def local(values: Tensor) -> Tensor:
        rows = values.new_zeros(step.num_rows, *values.shape[1:])
        rows[row] = values
        return rows

    q, k, v = (local(x).requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    out = attention(step, q, k, v, scale=scale)
    grads = torch.autograd.grad(out, (q, k, v), local(tensors.dout))
    return [rows[row] for rows in (out.detach(), *grads)]


def error(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected).norm() / expected.norm())


def plan_of(batch: Batch, shape: AttentionShape, ranks: int, solver: str, **options):
    machines = 2 if ranks >= 4 else 1
    config = PlannerConfig(solver=solver, **options)
    return plan_batch(batch, Topology(machines, ranks // machines), shape, config)
