"""Arena: one buffer for all calls, which rarely grows."""

import torch

from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    PlannerConfig,
    Topology,
    masks,
    plan_batch,
)
from dyncp.executor.engine import Arena

CPU = torch.device("cpu")


def test_every_call_takes_the_same_buffer():
    arena = Arena(CPU)
    first = arena.take(1000, 2000)
    assert (len(first), arena.used, arena.capacity) == (1000, 1000, 2000)
    assert arena.take(500).data_ptr() == first.data_ptr()
    assert arena.used == 500


def test_it_grows_exactly_at_first_and_with_headroom_later():
    arena = Arena(CPU)
    arena.take(1000)
    assert arena.capacity == 1000
    arena.take(500)
    assert arena.capacity == 1000
    arena.take(1500, 2000)
    assert arena.capacity == 2500


def test_views_are_kept_until_the_buffer_changes():
    arena, key = Arena(CPU), DCPExecutor()
    arena.views(key)["all"] = arena.take(256)
    arena.take(256)
    assert "all" in arena.views(key)
    arena.take(512)
    assert not arena.views(key)


def test_calls_of_one_step_use_the_same_memory():
    batch, shape = Batch.of([masks.causal(64)]), AttentionShape(4, 2, 8, "fp32")
    plan = plan_batch(batch, Topology(1, 3), shape, PlannerConfig("random", block_size=8))
    executor = DCPExecutor(virtual_ranks=3)
    step = executor.prepare(plan)
    q, kv = torch.randn(64, 4, 8, requires_grad=True), torch.randn(64, 2, 2, 8, requires_grad=True)
    capacities = []
    for _ in range(3):
        DCPAttn.apply(step, q, kv).sum().backward()
        capacities.append(executor.engine.arena().capacity)
    assert capacities[0] == capacities[1] == capacities[2] > 0
