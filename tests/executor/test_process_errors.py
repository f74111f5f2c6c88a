"""Processes that disagree or die: every rank gets an error message, and nothing leaks."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dyncp import (
    Batch,
    DCPAttn,
    DCPExecutor,
    Plan,
    PlannerConfig,
    Topology,
    TransportError,
    attention,
    masks,
    plan_batch,
)
from processes import run_ranks

BATCH = Batch.of(
    [{"default": masks.causal(40), "local": masks.sliding_window(40, window=9)} for _ in range(2)]
)


def make_plan(num_ranks: int = 2) -> Plan:
    config = PlannerConfig("random", block_size=4)
    return plan_batch(BATCH, Topology(1, num_ranks), planner=config)


def draw(step: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    rows = step.num_rows
    return torch.randn(rows, 4, 8, dtype=dtype), torch.randn(rows, 2, 2, 8, dtype=dtype)


def _outside(rank: int) -> str:
    group, said = dist.new_group([0]), "made"
    try:
        DCPExecutor(group=group, timeout=20).close()
    except ValueError as error:
        said = str(error)
    dist.barrier()
    return said


def test_a_rank_outside_the_group_is_told_so():
    said = run_ranks(_outside, 2)
    assert said[0] == "made"
    assert "rank 1 is not in the group" in said[1]


def _other_call(rank: int, what: str) -> str:
    step = DCPExecutor(timeout=3).prepare(make_plan().parts[rank])
    q, kv = draw(step, torch.float64 if what == "dtype" and rank else torch.float32)
    try:
        attention(step, q, *kv.unbind(1), mask="local" if what == "mask" and rank else "default")
    except TransportError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["mask", "dtype"])
def test_ranks_that_make_different_calls_all_get_a_sentence(what):
    for said in run_ranks(_other_call, 2, what):
        assert re.search("waited .*for a message from rank . in phase", said)
        assert "made another attention call" in said


def _dies_before_gather(rank: int) -> str:
    step = DCPExecutor(timeout=10).prepare(make_plan().parts[rank])
    if rank:
        os._exit(1)
    try:
        step.gather(torch.zeros(step.num_rows, 3))
    except TransportError as error:
        return str(error)
    return "no error"


def test_gather_names_what_it_waited_for_when_a_rank_dies():
    said = run_ranks(_dies_before_gather, 2)[0]
    assert "rank 0 of 2 got no answer from all other ranks while gathering rows" in said


def _gathers(rank: int) -> list[Any]:
    step = DCPExecutor(timeout=30).prepare(make_plan().parts[rank])
    coordinates = torch.from_numpy(step.plan.local_coordinates)
    wrong = []
    for dtype in (torch.int16, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.int64):
        got = torch.cat(step.gather((coordinates % 2).to(dtype)))
        if not torch.equal(got, (torch.arange(80) % 2).to(dtype)):
            wrong.append(str(dtype))
    rows = torch.zeros(step.num_rows, 2, requires_grad=True)
    for given in (rows, torch.zeros(step.num_rows, 2 + rank)):
        try:
            step.gather(given)
        except ValueError as error:
            wrong.append(str(error))
    with torch.no_grad():
        assert len(step.gather(rows)) == 2
    return wrong


def test_gather_takes_any_dtype_and_refuses_what_it_would_lose():
    for gradients, shapes in run_ranks(_gathers, 2):
        assert "gather got rows that require gradients" in gradients
        assert "rows of different dtypes or shapes" in shapes


def _held() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _opens_and_closes(rank: int) -> list[tuple[int, int]]:
    plan, held = make_plan(), []
    for _ in range(4):
        with DCPExecutor(timeout=30) as executor:
            step = executor.prepare(plan.parts[rank])
            DCPAttn.apply(step, *draw(step))
        held.append(_held())
    return held


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_closed_executor_leaves_no_files_and_threads_behind():
    for held in run_ranks(_opens_and_closes, 2):
        assert held[1:] == held[:-1]


@pytest.mark.parametrize("again", [False, True])
def test_a_closed_executor_says_so(again):
    executor = DCPExecutor(virtual_ranks=2)
    step = executor.prepare(make_plan())
    executor.close()
    if again:
        executor.close()
    with pytest.raises(ValueError, match="the executor was closed"):
        executor.prepare(make_plan())
    with pytest.raises(ValueError, match="the executor was closed"):
        DCPAttn.apply(step, *draw(step))
