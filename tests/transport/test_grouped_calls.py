"""Grouped calls on real gloo processes: the code for NCCL, except for the name of the backend."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cases import Case, Tensors, run_step, run_virtual
from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    Distributed,
    PlannerConfig,
    Topology,
    TransportError,
    masks,
    plan_batch,
)
from dyncp.plan import batch_order
from processes import end_together, run_ranks
from sizes import full

Pair = tuple[int, int]
NUM_PHASES = 6


HOW = ["gloo", "blocking", "joined"]


class Joined:
    """One work for a whole call, as NCCL returns it."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> bool:
        return all(work.wait(timedelta(seconds=20)) for work in self._works)


class Done:
    """What a blocking call returns."""

    def wait(self, limit: timedelta) -> bool:
        return True


@contextmanager
def recorded_calls(how: str) -> Iterator[list[tuple[str, int]]]:
    """Group and number of operations of every grouped call. "joined" calls return one work, like
    NCCL. "blocking" calls return when their messages have arrived, which allows the least
    concurrency: if this does not deadlock, NCCL does not. (Gloo sends nothing before the receiver
    is ready.)
    """
    calls, start = [], dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[Any]) -> list[Any]:
        calls.append((ops[0].group.group_name, len(ops)))
        works = start(ops)
        if how == "blocking":
            Joined(works).wait()
            return [Done() for _ in works]
        return [Joined(works)] if how == "joined" else works

    with mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv):
        yield calls


def transport_of(how: str, settings: dict[str, Any]) -> Distributed:
    transport = Distributed(timeout=30, **settings)
    transport.on_gpu = how == "joined"  # waits like NCCL
    return transport


def pairs_of(phase: int, num_ranks: int) -> set[Pair]:
    """All to all, one rank to all, all to one rank, then ragged subsets."""
    pairs = [(s, r) for s in range(num_ranks) for r in range(num_ranks) if s != r]
    if phase < 3:
        return {pair for pair in pairs if phase == 0 or pair[phase - 1] == num_ranks // 2}
    share = (0.2, 0.5, 0.8)[phase % 3]
    chosen = np.random.default_rng(phase).random(len(pairs)) < share
    return {pair for pair, one in zip(pairs, chosen, strict=True) if one}


def message(sender: int, receiver: int, phase: int) -> Tensor:
    """Its length and contents identify sender, receiver and phase."""
    length = 1 + (7 * sender + 13 * receiver + 1000 * phase) % 5000
    start = 5 * sender + 11 * receiver + 17 * phase
    return (torch.arange(length) + start).remainder(251).to(torch.uint8)


def exchange(rank: int, num_ranks: int, how: str, settings: dict[str, Any]) -> Any:
    """Runs all phases twice, waits in reverse order, and checks what arrived."""
    transport = transport_of(how, settings)
    with recorded_calls(how) as calls:
        for _ in range(2):
            _run_phases(transport, rank, num_ranks)
    names = [(one.name, one.group.group_name) for one in transport.communicators]
    return calls, names, transport.nodes


def _run_phases(transport: Distributed, rank: int, num_ranks: int) -> None:
    [channel] = transport.open()
    buffers = {}
    for phase in range(NUM_PHASES):
        pairs = pairs_of(phase, num_ranks)
        sends = {r: message(s, r, phase) for s, r in pairs if s == rank}
        buffers[phase] = {s: torch.zeros_like(message(s, r, phase)) for s, r in pairs if r == rank}
        channel.launch(phase, sends, buffers[phase])
    for phase in reversed(range(NUM_PHASES)):
        channel.wait(phase)
        for sender, buffer in buffers[phase].items():
            assert torch.equal(buffer, message(sender, rank, phase)), (sender, rank, phase)
    channel.finish()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (4, {"grouped_operations": 2}),
        full(5, {"grouped_operations": 5}),
        (6, {"grouped_operations": 2, "ranks_per_node": 3}),
        full(8, {"grouped_operations": 6, "ranks_per_node": 2}),
        full(4, {"ranks_per_node": 1}),
    ],
)
def test_every_message_arrives_in_calls_below_the_limit(num_ranks, settings, how):
    results = run_ranks(exchange, num_ranks, num_ranks, how, settings)
    limit = settings.get("grouped_operations", 128)
    for calls, _, _ in results:
        assert max(operations for _, operations in calls) <= limit
    sent = sum(len(pairs_of(phase, num_ranks)) for phase in range(NUM_PHASES))
    assert sum(operations for calls, _, _ in results for _, operations in calls) == 2 * 2 * sent


def test_there_are_two_communicators_and_no_unused_one():
    def names(num_ranks: int, per_node: int | None) -> set[tuple[str, ...]]:
        settings = {"ranks_per_node": per_node}
        results = run_ranks(exchange, num_ranks, num_ranks, "gloo", settings)
        return {tuple(name for name, _ in names) for _, names, _ in results}

    assert names(4, 2) == {("inside", "between")}
    assert names(3, 1) == {("between",)}
    assert names(3, None) == {("inside",)}


def test_calls_inside_nodes_come_first_in_every_phase_on_every_rank():
    settings = {"grouped_operations": 128, "ranks_per_node": 2}
    for rank, (calls, names, nodes) in enumerate(run_ranks(exchange, 4, 4, "gloo", settings)):
        assert nodes == (0, 0, 1, 1)
        own = [name for group, _ in calls for name, one in names if one == group]
        expected = []
        for phase in range(NUM_PHASES):
            mine = [pair for pair in pairs_of(phase, 4) if rank in pair]
            inside = {nodes[s] == nodes[r] for s, r in mine}
            expected += [name for name in ("inside", "between") if (name == "inside") in inside]
        assert own == expected * 2


def pose_as_nodes(rank: int, hosts: str) -> tuple[tuple[int, ...], list[str]]:
    with mock.patch("dyncp.transport.distributed.host_id", return_value=hosts[rank]):
        transport = Distributed(timeout=30, grouped_operations=2)
    _run_phases(transport, rank, len(hosts))
    return transport.nodes, [one.name for one in transport.communicators]


def test_nodes_may_be_of_any_size_and_their_ranks_in_any_order():
    results = run_ranks(pose_as_nodes, 5, "abaca")
    assert {nodes for nodes, _ in results} == {(0, 1, 0, 2, 0)}
    assert {tuple(names) for _, names in results} == {("inside", "between")}


def differ(rank: int) -> str:
    with pytest.raises(ValueError, match="they must be equal on all ranks") as caught:
        Distributed(timeout=30, grouped_operations=64 if rank == 1 else 128)
    return str(caught.value)


def test_all_ranks_get_the_error_about_settings_that_differ():
    assert len(set(run_ranks(differ, 3))) == 1


def give_mistakes(rank: int) -> list[str]:
    texts = []
    for settings in ({"ranks_per_node": 2}, {"grouped_operations": 1}):
        with pytest.raises(ValueError, match=next(iter(settings))) as caught:
            Distributed(**settings)
        texts.append(str(caught.value))
    return texts


def test_settings_that_cannot_be_are_refused_with_what_is_allowed():
    [texts, *_] = run_ranks(give_mistakes, 3)
    assert "ranks_per_node is 2, and the group has 3 ranks; give a divisor" in texts[0]
    assert "grouped_operations is 1; at least 2" in texts[1]


def wait_in_vain(rank: int) -> tuple[str, float]:
    transport = Distributed(timeout=2, ranks_per_node=2)
    [channel] = transport.open()
    if rank == 3:
        end_together(0, 1, 2, 3)
        return "", 0.0
    start, buffer = time.monotonic(), torch.zeros(8, dtype=torch.uint8)
    channel.launch(7, {}, {3: buffer})
    with pytest.raises(TransportError) as caught:
        channel.wait(7)
    seconds = time.monotonic() - start
    end_together(0, 1, 2, 3)
    return str(caught.value), seconds


def test_a_message_that_does_not_come_is_named_within_the_timeout():
    for rank, (text, seconds) in enumerate(run_ranks(wait_in_vain, 4)[:3]):
        assert f"rank {rank} waited" in text
        assert "rank 3 in phase 7" in text
        assert seconds < 8


def make_case() -> Case:
    batch = Batch.of([masks.causal(90), masks.lambda_shaped(60, sinks=2, window=9), masks.full(25)])
    shape = AttentionShape(4, 2, 8, "fp32")
    config = PlannerConfig("random", block_size=5, head_groups=2, divisions=3, seed=3)
    return Case(batch, plan_batch(batch, Topology(2, 3), shape, config), shape, 3)


def attend(rank: int, how: str, settings: dict[str, Any]) -> tuple[list[np.ndarray], int]:
    case, transport = make_case(), transport_of(how, settings)
    step = DCPExecutor(transport=transport).prepare(case.plan.parts[rank])
    with recorded_calls(how) as calls:
        rows = run_step(step, case, "default", Tensors.draw(case))
    assert {group for group, _ in calls} == {
        one.group.group_name for one in transport.communicators
    }
    return [value.numpy() for value in rows], max(operations for _, operations in calls)


@pytest.mark.parametrize("how", HOW)
def test_an_executor_has_the_bits_of_virtual_ranks_whatever_the_groups(how):
    case, settings = make_case(), {"grouped_operations": 2, "ranks_per_node": 3}
    results = run_ranks(attend, 6, how, settings)
    assert {most for _, most in results} <= {1, 2}
    order, virtual = (
        batch_order(case.plan.parts[0]),
        run_virtual(case, "default", Tensors.draw(case)),
    )
    for i, (name, value) in enumerate(virtual.tensors().items()):
        given = np.concatenate([rows[i] for rows, _ in results])[order]
        assert torch.equal(torch.from_numpy(given), value), name
