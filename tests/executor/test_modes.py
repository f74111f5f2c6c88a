"""Attention under torch's modes, differentiated twice, compiled."""

import pytest
import torch
from torch import Tensor

from dense import dense_attention, relative_error
from dyncp import (
    Batch,
    DCPAttn,
    DCPExecutor,
    PlannerConfig,
    Step,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.plan import batch_order

BATCH = Batch.of([masks.causal(20), masks.causal(3), masks.sliding_window(11, window=3)])
PLAN = plan_batch(BATCH, Topology(1, 3), planner=PlannerConfig("random", block_size=4))
ORDER = torch.from_numpy(batch_order(PLAN.parts[0]))


def make_step(**options: object) -> Step:
    return DCPExecutor(virtual_ranks=3, **options).prepare(PLAN)


def draw(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((34, 4, 8), (34, 2, 2, 8))
    q, kv = (torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for s in shapes)
    return q.requires_grad_(), kv.requires_grad_()


def dense(q: Tensor, kv: Tensor) -> Tensor:
    """Dense attention, in batch order."""
    rows = (x[ORDER] for x in (q, kv[:, 0], kv[:, 1]))
    return dense_attention(BATCH, "default", *rows, scale=8**-0.5)


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), inputs)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("prepared_inside", [False, True])
def test_training_goes_on_after_a_call_in_inference_mode(kernel, prepared_inside):
    step = make_step(kernel=kernel)
    q, kv = draw(0)
    with torch.inference_mode():
        if prepared_inside:
            step = make_step(kernel=kernel)
        evaluated = DCPAttn.apply(step, q, kv)
    out = DCPAttn.apply(step, q, kv)
    assert torch.equal(out, evaluated)
    wanted = gradients(dense(q, kv), q, kv)
    for got, expected in zip(gradients(out, q, kv), wanted, strict=True):
        assert relative_error(got, expected) < 1e-12


@pytest.mark.parametrize("derivative", ["hvp", "vhp"])
def test_second_derivatives_raise_also_where_the_loss_is_linear(derivative):
    step = make_step()
    q, kv = draw(0)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        getattr(torch.autograd.functional, derivative)(
            lambda x: DCPAttn.apply(step, x, kv).sum(), q, torch.ones_like(q)
        )


def test_a_second_derivative_through_a_sink_raises():
    step = make_step()
    q, kv = draw(0)
    sink = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    out = attention(step, q, kv[:, 0], kv[:, 1], sink=sink)
    (slope,) = torch.autograd.grad(out.sum(), sink, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(slope.sum(), q)


def test_gradients_with_create_graph_are_the_same():
    step = make_step()
    q, kv = draw(0)
    kept = torch.autograd.grad(DCPAttn.apply(step, q, kv).sum(), (q, kv), create_graph=True)
    plain = torch.autograd.grad(DCPAttn.apply(step, q, kv).sum(), (q, kv))
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_autocast_changes_neither_outputs_nor_gradients(kernel, low):
    step = make_step(kernel=kernel)
    q, kv = draw(0, torch.float32)
    sink = torch.zeros(4, requires_grad=True)
    plain = attention(step, q, *kv.unbind(1), sink=sink)
    dout = draw(1, torch.float32)[0].detach()
    wanted = torch.autograd.grad(plain, (q, kv, sink), dout)
    with torch.autocast("cpu", dtype=low):
        out = attention(step, q, *kv.unbind(1), sink=sink)
        grads = torch.autograd.grad(out, (q, kv, sink), dout)
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(a, b) for a, b in zip((out, *grads), (plain, *wanted), strict=True))


def test_a_compiled_model_gives_what_it_gives_without():
    step = make_step()
    weight = torch.eye(8, dtype=torch.float64) * 0.5

    def model(q: Tensor, kv: Tensor) -> Tensor:
        return DCPAttn.apply(step, q @ weight, kv) * 2

    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(2):
        q, kv = draw(seed)
        out, plain = compiled(q, kv), model(q, kv)
        assert torch.equal(out, plain)
        for got, wanted in zip(gradients(out, q, kv), gradients(plain, q, kv), strict=True):
            assert relative_error(got, wanted) < 1e-12


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_default_device_and_dtype_do_not_matter(kernel):
    q, kv = draw(0)
    plain = DCPAttn.apply(make_step(kernel=kernel), q, kv)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        with torch.device("meta"):
            out = DCPAttn.apply(make_step(kernel=kernel), q, kv)
            grads = gradients(out, q, kv)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(out, plain)
    assert all(torch.equal(a, b) for a, b in zip(grads, gradients(plain, q, kv), strict=True))
