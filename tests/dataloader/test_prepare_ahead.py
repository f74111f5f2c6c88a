"""Plans are lowered for their executor in the background."""

import threading

import pytest
import torch

from dyncp import (
    AttentionShape,
    Batch,
    CostModel,
    DCPDataLoader,
    DCPExecutor,
    LoaderTuning,
    attention,
    find_profile,
    masks,
    plan_batch,
)
from dyncp.kernels import CpuKernel
from dyncp.topology import Topology
from processes import run_ranks

pytestmark = pytest.mark.usefixtures("plans_here")

SAMPLES = [{"input_ids": list(range(length))} for length in (300, 40, 120, 7, 500, 90)]
SHAPE = AttentionShape(4, 2, 8, "fp32")


class Recording(CpuKernel):
    """Names the threads that lower calls."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def lower(self, *arguments, **options):
        self.threads.append(threading.current_thread().name)
        return super().lower(*arguments, **options)


def results(loader, executor):
    """Output and gradients of every batch."""
    found = []
    for data, plan in loader:
        step, generator = executor.prepare(plan), torch.Generator().manual_seed(len(found))
        rows = len(data["input_ids"][0])
        q, k, v = (torch.randn(rows, heads, 8, generator=generator) for heads in (4, 2, 2))
        q.requires_grad_()
        out = attention(step, q, k, v)
        found += [out.detach(), *torch.autograd.grad(out.square().sum(), q)]
    return found


def open_loader(executor=None, **options):
    """The same plans with and without an executor, whose prices they would have otherwise."""
    tuning = LoaderTuning(cost=CostModel(find_profile("cpu_gloo"), SHAPE))
    options |= {"tokens_per_batch": 600, "tuning": tuning}
    return DCPDataLoader(SAMPLES, masks.causal, executor=executor, **options)


@pytest.mark.parametrize("model", [SHAPE, None])
def test_prepare_finds_its_plan_lowered(model):
    kernel = Recording()
    executor = DCPExecutor(kernel=kernel, virtual_ranks=3)
    with open_loader(executor, model=model, virtual_ranks=3) as loader:
        ahead = results(loader, executor)
    assert set(kernel.threads) == {"dyncp-deliver"}
    plain = DCPExecutor(kernel=Recording(), virtual_ranks=3)
    with open_loader(model=model, virtual_ranks=3) as loader:
        expected = results(loader, plain)
    assert set(plain.kernel.threads) == {threading.current_thread().name}
    assert len(ahead) == len(expected) == 4
    assert all(torch.equal(a, b) for a, b in zip(ahead, expected, strict=True))


def _train(rank):
    executor = DCPExecutor(kernel=Recording(), timeout=60)
    with open_loader(executor) as loader:
        ahead = results(loader, executor)
    threads = set(executor.kernel.threads)
    with open_loader() as loader:
        expected = results(loader, executor)
    same = all(torch.equal(a, b) for a, b in zip(ahead, expected, strict=True))
    return threads, len(ahead), same


def test_prepare_finds_its_plan_lowered_on_processes():
    assert run_ranks(_train, 2) == [({"dyncp-deliver"}, 4, True)] * 2


def test_executors_of_other_ranks_are_refused():
    with pytest.raises(ValueError, match="executor= runs rank 0 to 3 of 4; this loader's plans"):
        open_loader(DCPExecutor(virtual_ranks=4), virtual_ranks=2)
    with pytest.raises(ValueError, match="executor is str"):
        open_loader("executor")


def test_a_closed_executor_says_so_in_prepare():
    executor = DCPExecutor(virtual_ranks=2)
    with open_loader(executor, virtual_ranks=2) as loader:
        _, plan = next(iter(loader))
        executor.close()
        with pytest.raises(ValueError, match="the executor was closed"):
            executor.prepare(plan)


def test_plans_that_are_never_prepared_do_not_pile_up():
    kernel = Recording()
    executor = DCPExecutor(kernel=kernel, virtual_ranks=1)
    batch = Batch.of([masks.causal(32)])
    plans = [plan_batch(batch, Topology(1, 1), SHAPE) for _ in range(70)]
    for plan in plans:
        executor.prepare_ahead(plan)
    lowered = len(kernel.threads)
    for plan in plans[-64:]:
        executor.prepare(plan)
    assert len(kernel.threads) == lowered
    executor.prepare(plans[0])
    assert len(kernel.threads) > lowered
