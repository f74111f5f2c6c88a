"""torch.compile: attention is one operator of the graph, and one graph serves all batches."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dense import relative_error
from dyncp import (
    AttentionShape,
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
from sizes import pick

EXECUTOR = DCPExecutor(virtual_ranks=3)


def make_step(seed: int, **options: object) -> Step:
    lengths = torch.randint(4, 60, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    config = PlannerConfig("random", block_size=8, **options)
    batch = Batch.of([masks.causal(length) for length in lengths])
    return EXECUTOR.prepare(plan_batch(batch, Topology(1, 3), planner=config))


def draw(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    shapes = ((rows, 4, 8), (rows, 2, 2, 8), (4,))
    q, kv, sink = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    return q, kv, sink


def layer(step: Step, q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
    return attention(step, q * 0.5, *kv.unbind(1), sink=sink, scale=-0.3, padded=True) * 2


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def test_many_batches_compile_twice_and_give_what_they_give_without():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for seed in range(pick(10, 50)):
        step = make_step(seed)
        inputs = draw(step.num_rows + seed % 3, seed)
        out, plain = compiled(step, *inputs), layer(step, *inputs)
        assert relative_error(out, plain) < 1e-12
        for got, wanted in zip(
            torch.autograd.grad(out.square().sum(), inputs),
            torch.autograd.grad(plain.square().sum(), inputs),
            strict=True,
        ):
            assert relative_error(got, wanted) < 1e-12
    assert counter.frame_count <= 2


def test_packed_kv_and_the_alias_compile_too():
    step = make_step(0)
    q, kv, _ = draw(step.num_rows)
    compiled = torch.compile(DCPAttn.apply, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(step, q, kv), DCPAttn.apply(step, q, kv))


def test_a_step_that_was_dropped_lives_until_its_backward():
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    step = make_step(0)
    inputs = draw(step.num_rows)
    wanted = torch.autograd.grad(layer(step, *inputs).sum(), inputs)
    out = compiled(step, *inputs)
    alive = weakref.ref(step.prepared)
    del step
    make_step(1)  # the executor keeps its latest step
    got = torch.autograd.grad(out.sum(), inputs)
    assert all(relative_error(a, b) < 1e-12 for a, b in zip(got, wanted, strict=True))
    del out
    gc.collect()
    assert alive() is None


def test_what_is_wrong_with_a_call_is_said_when_the_graph_runs():
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    step = make_step(0)
    with pytest.raises(ValueError, match="this plan gives these ranks"):
        compiled(step, *draw(step.num_rows - 1))
    step = make_step(0, forward_only=True)
    with pytest.raises(ValueError, match="made for evaluation"):
        compiled(step, *draw(step.num_rows)).sum().backward()


def test_autocast_does_not_reach_into_a_compiled_call():
    step = make_step(0)
    inputs = tuple(x.detach().float() for x in draw(step.num_rows))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(step, *inputs), layer(step, *inputs))


def test_rows_behind_the_plans_take_no_part():
    step = make_step(0)
    q, kv, sink = draw(step.num_rows + 3)
    out = attention(step, q, kv, sink=sink, padded=True)
    exact = attention(step, q[:-3], kv[:-3], sink=sink)
    assert torch.equal(out[:-3], exact)
    assert not out[-3:].any()
    dq, dkv = torch.autograd.grad(out.sum(), (q, kv))
    assert not dq[-3:].any()
    assert not dkv[-3:].any()
    with pytest.raises(ValueError, match="local rows"):
        attention(step, q, kv)


def test_a_shape_that_the_plan_was_not_made_for_is_refused_in_a_graph():
    batch = Batch.of([masks.causal(30)])
    plan = plan_batch(batch, Topology(1, 3), AttentionShape(2, 2, 8, "fp64"))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="the plan was made for 2 q heads"):
        compiled(EXECUTOR.prepare(plan), *draw(30))
