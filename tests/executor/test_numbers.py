"""NaN and infinity reach only rows that attend them; any scale; 16-bit accuracy."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dense import relative_error
from dyncp import (
    Batch,
    DCPExecutor,
    Plan,
    PlannerConfig,
    Step,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.plan import batch_order

KERNELS = pytest.mark.parametrize("kernel", ["cpu", "reference"])
BATCH = Batch.of(
    [
        masks.causal(40),
        masks.lambda_shaped(50, sinks=3, window=7),
        masks.shared_question(60, question=20, answers=4),
        masks.causal(9),
    ]
)
TOKENS = BATCH.num_tokens


def make_step(kernel: str, ranks: int = 3) -> tuple[Step, Plan]:
    config = PlannerConfig("random", block_size=16)
    plan = plan_batch(BATCH, Topology(1, ranks), planner=config)
    return DCPExecutor(virtual_ranks=ranks, kernel=kernel).prepare(plan), plan


def draw(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and dout in batch order."""
    rng = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)
    return [torch.randn(TOKENS, h, 8, generator=rng, dtype=torch.float64).to(dtype) for h in heads]


def run(step: Step, plan: Plan, tensors: list[Tensor], **options: float) -> list[Tensor]:
    """out, dq, dk and dv in batch order."""
    order = torch.from_numpy(batch_order(plan.parts[0]))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    q, k, v, dout = (x[back] for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(step, *inputs, **options)
    return [x[order] for x in (out.detach(), *torch.autograd.grad(out, inputs, dout))]


def row_by_row(tensors: list[Tensor], scale: float = 8**-0.5) -> list[Tensor]:
    """The same results, each row computed from only the keys that it attends."""
    q, k, v, dout = (x.detach().double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = []
    for index, mask in enumerate(BATCH.masks["default"]):
        first = int(BATCH.offsets[index])
        for row, allowed in enumerate(mask.dense()):
            keys = first + torch.from_numpy(allowed.nonzero()[0])
            key, value = (x[keys].repeat_interleave(2, dim=1) for x in (k, v))
            weights = torch.einsum("hd,khd->hk", q[first + row], key).mul(scale).softmax(dim=-1)
            out.append(torch.einsum("hk,khd->hd", weights, value))
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for row, of_row in zip(out, dout, strict=True):
        for total, part in zip(grads, torch.autograd.grad(row, (q, k, v), of_row), strict=True):
            total.add_(part)
    return [torch.stack(out).detach(), *grads]


@KERNELS
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_a_number_that_is_not_finite_reaches_only_rows_that_see_it(kernel, number, where):
    step, plan = make_step(kernel)
    tensors = draw()
    tensors[("q", "k", "v", "dout").index(where)][70, 1] = number
    for got, expected in zip(run(step, plan, tensors), row_by_row(tensors), strict=True):
        assert torch.equal(got.isfinite(), expected.isfinite())
        finite = expected.isfinite()
        assert relative_error(got[finite], expected[finite]) < 1e-5


@KERNELS
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.7, 1e-40, -1e-40, 3.0])
def test_any_finite_scale_gives_what_dense_attention_gives(kernel, scale):
    step, plan = make_step(kernel)
    tensors = draw(torch.float64)
    got, expected = run(step, plan, tensors, scale=scale), row_by_row(tensors, scale)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * max(1.0, theirs.norm())


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (math.nan, "scale is nan; a finite number"),
        (math.inf, "scale is inf; a finite number"),
        ("large", "scale is 'large'; a finite number"),
        (torch.ones((), requires_grad=True), "requires gradients, and would get none"),
    ],
)
def test_a_scale_that_is_no_finite_number_is_refused(scale, message):
    step, plan = make_step("cpu")
    with pytest.raises(ValueError, match=message):
        run(step, plan, draw(), scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [8, 64, 128])
def test_16_bit_gradients_are_as_exact_as_sdpas_where_output_gradients_are_alike(dtype, dim):
    step = DCPExecutor().prepare(plan_batch(Batch.of([masks.causal(64)]), Topology()))
    rng = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 64, 4, dim, generator=rng)
    inputs = [x.to(dtype) for x in (q, k, v + 1)]

    def gradients(function: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves).sum(), leaves)

    exact = gradients(sdpa, torch.float64)
    theirs, ours = gradients(sdpa, dtype), gradients(partial(attention, step), dtype)
    for mine, other, wanted in zip(ours, theirs, exact, strict=True):
        assert relative_error(mine, wanted) < 1.2 * relative_error(other, wanted)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    return out[0].transpose(0, 1)
