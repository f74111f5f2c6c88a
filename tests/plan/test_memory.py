"""Plan.memory: the bytes that the executor's workspaces really take, known before they exist."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from cases import TORCH, Case, cases
from dyncp import AttentionShape, Batch, DCPExecutor, PlannerConfig, Topology, masks, plan_batch
from dyncp.executor import call
from dyncp.plan import Layout

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture
def runs(monkeypatch) -> list[Any]:
    """The workspaces of every call that the executor makes, which runs as always."""
    noted: list[Any] = []
    original = call._run

    def run(step, ranks, options):
        noted.append([spaces for _, spaces in ranks])
        original(step, ranks, options)

    monkeypatch.setattr(call, "_run", run)
    return noted


def allocated(case: Case, name: str, runs: list[Any]) -> list[list[int]]:
    """Bytes of each rank's workspaces, forward and backward, apart from what the caller owns."""
    runs.clear()
    step = DCPExecutor(virtual_ranks=case.plan.num_ranks, kernel="reference").prepare(case.plan)
    shape, rows = case.shape, step.num_rows
    options = call.CallOptions(name, 0.5)

    def rows_of(heads: int) -> Tensor:
        return torch.ones(rows, heads, shape.head_dim, dtype=TORCH[shape.dtype])

    inputs = rows_of(shape.q_heads), rows_of(shape.kv_heads), rows_of(shape.kv_heads)
    out, lse = call.attend_forward(step, options, *inputs)
    dout, delta = torch.ones_like(out), torch.ones_like(lse)
    call.attend_backward(step, options, inputs, dout, lse, delta)
    given = inputs, (*inputs, dout, lse, delta)
    return [
        [_new_bytes(spaces, {_storage(x) for x in owned}) for spaces in ranks]
        for ranks, owned in zip(runs, given, strict=True)
    ]


def _new_bytes(spaces: list[Any], owned: set[int]) -> int:
    """A tensor of a head group is made anew, or is the caller's own (a view of it)."""
    tensors = [x for space in spaces for x in space.tensors.values() if _storage(x) not in owned]
    return sum(tensor.nbytes for tensor in tensors)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(case=cases())
def test_the_estimate_is_what_the_executor_allocates(case, runs):
    calls = [allocated(case, name, runs) for name in case.plan.parts[0].masks]
    largest = np.max(calls, axis=0)
    memory = case.plan.memory()
    assert largest.tolist() == [memory.forward.tolist(), memory.backward.tolist()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_holds_for_accumulators_wider_than_the_inputs(dtype, runs):
    shape = AttentionShape(4, 2, 16, dtype)
    batch = Batch.of([masks.causal(400), masks.lambda_shaped(150, sinks=4, window=32)])
    config = PlannerConfig("random", block_size=32, head_groups=2, layout=Layout(16, 8))
    plan = plan_batch(batch, Topology(1, 4), shape, config)
    forward, backward = allocated(Case(batch, plan, shape, 0), "default", runs)
    memory = plan.memory()
    assert memory.forward.tolist() == forward
    assert memory.backward.tolist() == backward
    assert memory.per_rank.tolist() == backward
    assert memory.peak == max(backward)


def test_a_plan_for_any_shape_says_the_bytes_of_a_given_one():
    batch = Batch.of([masks.causal(300)])
    plan = plan_batch(batch, Topology(1, 2))
    small, wide = AttentionShape(2, 1, 16, "fp32"), AttentionShape(4, 2, 16, "fp32")
    assert (2 * plan.memory(small).forward == plan.memory(wide).forward).all()
    assert plan.memory().peak == plan.memory(plan.parts[0].shape).peak


def test_by_hand_without_any_transfer():
    """One rank, 10 tokens, 2 heads of 4: an fp32 accumulator and log-sum-exps, inputs uncopied."""
    plan = plan_batch(Batch.of([masks.causal(10)]), Topology(1, 1), AttentionShape(2, 1, 4, "bf16"))
    memory = plan.memory()
    assert memory.forward.tolist() == [10 * 2 * 4 * 4 + 10 * 2 * 4]
    assert memory.backward.tolist() == [10 * 2 * 4 * 4 + 2 * 10 * 4 * 4]


def test_a_plan_for_evaluation_has_no_backward():
    config = PlannerConfig(forward_only=True)
    plan = plan_batch(Batch.of([masks.causal(100)]), Topology(1, 2), config=config)
    memory = plan.memory()
    assert memory.backward.tolist() == [0, 0]
    assert memory.peak == memory.forward.max()
