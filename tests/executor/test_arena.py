"""Arena: one buffer for all calls, which grows seldom."""

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
from dyncp.executor.arena import Arena

CPU = torch.device("cpu")


def test_pieces_lie_behind_each_other_on_borders_of_256_bytes():
    arena = Arena(CPU)
    arena.reset(1024)
    first, second = arena.take(10), arena.take(300)
    assert second.data_ptr() - first.data_ptr() == 256
    assert arena.used == 256 + 512
    arena.reset()
    assert arena.take(5).data_ptr() == first.data_ptr()


def test_it_grows_exactly_at_first_and_with_headroom_later():
    arena = Arena(CPU)
    arena.reset(1000)
    assert arena.capacity == 1000
    arena.reset(500)
    assert arena.capacity == 1000
    arena.reset(2000)
    assert arena.capacity == 2500


def test_a_piece_that_does_not_fit_gets_memory_of_its_own_until_the_next_reset():
    arena = Arena(CPU)
    arena.reset(256)
    arena.take(256)
    extra = arena.take(512)
    extra.fill_(1)
    assert len(extra) == 512
    arena.reset()
    assert arena.capacity >= 768


def test_views_are_kept_until_the_buffer_changes():
    arena, key = Arena(CPU), DCPExecutor()
    arena.reset(256)
    views = arena.take(256)
    arena.keep(key, views)
    arena.reset(256)
    assert arena.kept(key) is views
    arena.reset(512)
    assert arena.kept(key) is None


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
