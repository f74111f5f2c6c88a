"""One executor called from several threads."""

import threading
import time

import pytest
import torch
from torch import Tensor

from dense import relative_error
from dyncp import Batch, DCPAttn, DCPExecutor, PlannerConfig, Topology, masks, plan_batch
from dyncp.kernels import CpuKernel
from processes import run_ranks
from sizes import full, pick

BATCH = Batch.of([masks.causal(n) for n in (20, 3, 11)])
NUM_THREADS = 6


@pytest.fixture(autouse=True)
def bytes_moved_equal_the_plans():
    """Disabled here: all threads add to the same counter."""


def make_plan(seed: int, ranks: int = 3):
    config = PlannerConfig("random", block_size=4, seed=seed)
    return plan_batch(BATCH, Topology(1, ranks), planner=config)


def draw(seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    q, kv = (torch.randn(s, generator=rng).double() for s in ((34, 4, 8), (34, 2, 2, 8)))
    return q.requires_grad_(), kv.requires_grad_()


def in_threads(function) -> None:
    threads = [threading.Thread(target=function, args=(i,)) for i in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("one_plan", [full(True), False])
def test_threads_that_share_an_executor_all_get_right_results(one_plan):
    shared = DCPExecutor(virtual_ranks=3)
    right: list[int] = []

    def train(index: int) -> None:
        plan = make_plan(0 if one_plan else index)
        steps = shared.prepare(plan), DCPExecutor(virtual_ranks=3).prepare(plan)
        for seed in range(pick(5, 20)):
            q, kv = draw(100 * index + seed)
            outs = [DCPAttn.apply(step, q, kv) for step in steps]
            grads = [torch.autograd.grad(out.square().sum(), (q, kv)) for out in outs]
            pairs = zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True)
            right.append(all(relative_error(a, b) < 1e-12 for a, b in pairs))

    in_threads(train)
    assert right == [True] * pick(5, 20) * NUM_THREADS


class Slow(CpuKernel):
    def attend(self, *arguments: object) -> None:
        time.sleep(0.5)
        super().attend(*arguments)


def _calls_of_two_threads(rank: int) -> list[str]:
    """On both ranks the second thread gets an error, and the first one continues."""
    step = DCPExecutor(kernel=Slow(), timeout=30).prepare(make_plan(0, ranks=2).parts[rank])
    q, kv = torch.randn(step.num_rows, 4, 8), torch.randn(step.num_rows, 2, 2, 8)
    said: list[str] = []

    def call(wait: float) -> None:
        time.sleep(wait)
        try:
            DCPAttn.apply(step, q, kv)
        except RuntimeError as error:
            said.append(str(error))

    threads = [threading.Thread(target=call, args=(wait,)) for wait in (0.0, 0.2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return said


def test_processes_refuse_a_second_thread_while_a_call_is_under_way():
    for said in run_ranks(_calls_of_two_threads, 2):
        assert len(said) == 1
        assert "two threads call attention of one executor at the same time" in said[0]
