"""Accelerate's loop under dyncp: three ranks train as one process, and misuse is refused."""

import os
from itertools import chain, repeat

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="the extra transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="the extra transformers is not installed")

from benchmarks.parity_models import documents, make_model  # noqa: E402

from dyncp import DCPExecutor, LoaderTuning, PlannerConfig, masks, sum_over_ranks  # noqa: E402
from dyncp.integrations.accelerate import AcceleratorMixin  # noqa: E402
from dyncp.integrations.transformers import attach  # noqa: E402
from processes import free_port, run_ranks  # noqa: E402

EPOCHS, ACCUMULATION, NORM = 2, 2, 0.4
DOCUMENTS = 33  # five batches: the last optimiser step of an epoch has only one
OPTIONS = {
    "tokens_per_batch": 400,
    "planner": PlannerConfig(block_size=16),
    "tuning": LoaderTuning(num_planners=0),
}


class DynamicAccelerator(AcceleratorMixin, accelerate.Accelerator):
    pass


def run_of_rank(rank, folder, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "MASTER_PORT": str(port)}
    accelerator = DynamicAccelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    assert accelerator.num_processes == dist.get_world_size()
    model = make_model("gemma3")
    attached = attach(model)
    loader = attached.loader(
        documents(DOCUMENTS, longest=150), masks.causal, accumulation_steps=ACCUMULATION, **OPTIONS
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    run, optimizer, same, scheduler = prepared
    assert same is loader
    accelerator.register_for_checkpointing(loader)
    start = loader.state_dict()
    executor, losses, total = DCPExecutor(timeout=60), [], torch.zeros((), dtype=torch.float64)
    for local_data, plan in chain.from_iterable(repeat(loader, EPOCHS)):
        with accelerator.accumulate(run):
            loss = run(**local_data, dyncp_step=executor.prepare(plan)).loss
            accelerator.backward(loss)
            total += loss.detach()
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(run.parameters(), NORM)
                losses.append((sum_over_ranks(total.clone()).item(), float(norm)))
                total.zero_()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    position = loader.state_dict()
    loader.load_state_dict(start)
    accelerator.load_state(folder)
    assert loader.state_dict() == position != start
    weights = [p.detach().numpy() for p in model.parameters()]
    return losses, weights, scheduler.get_last_lr()


def alone():
    """The same batches in plain PyTorch: no wrapper, no average."""
    model = make_model("gemma3")
    loader = attach(model).loader(
        documents(DOCUMENTS, longest=150), masks.causal, accumulation_steps=ACCUMULATION, **OPTIONS
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    executor, losses, total = DCPExecutor(), [], 0.0
    for _ in range(EPOCHS):
        batches = list(loader)
        assert len(batches) % ACCUMULATION
        for number, (local_data, plan) in enumerate(batches, start=1):
            loss = model(**local_data, dyncp_step=executor.prepare(plan)).loss
            loss.backward()
            total += loss.item()
            if number % ACCUMULATION == 0 or number == len(batches):
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append((total, float(norm)))
                total = 0.0
    return losses, [p.detach().numpy() for p in model.parameters()], scheduler.get_last_lr()


def test_three_ranks_under_accelerate_train_as_one_process(tmp_path):
    wanted = alone()
    found = run_ranks(run_of_rank, 3, str(tmp_path), free_port(), timeout=200)[0]
    for got, expected in zip(found[0], wanted[0], strict=True):
        assert got == pytest.approx(expected, rel=1e-5)
    assert len(wanted[0]) == 6
    assert min(norm for _, norm in wanted[0]) > NORM  # clipping mattered
    for got, expected in zip(found[1], wanted[1], strict=True):
        assert abs(got - expected).max() <= 1e-4 * abs(expected).max()
    assert found[2] == wanted[2]  # the scheduler made as many steps


@pytest.fixture(scope="module")
def accelerator():
    return DynamicAccelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)


def test_what_accelerate_would_distribute_or_divide_is_refused(accelerator):
    model = make_model("llama")
    with pytest.raises(ValueError, match="torch DataLoader, whose batches Accelerate would"):
        accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
    with pytest.raises(ValueError, match="LlamaForCausalLM with attention 'sdpa': call attach"):
        accelerator.prepare(model)
    with pytest.raises(ValueError, match=r"backward was called before prepare\(model, optim"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    with (
        attach(model).loader(documents(5), masks.causal, virtual_ranks=1) as loader,
        pytest.raises(ValueError, match="steps of 1 batches and Accelerate makes steps of 2"),
    ):
        accelerator.prepare(model, loader)


def test_two_kinds_of_context_parallelism_are_refused():
    config = accelerate.ParallelismConfig(cp_size=2)
    with pytest.raises(ValueError, match="configured with context or sequence parallelism"):
        AcceleratorMixin.__init__(Configured(config))


class Asked:
    def __init__(self):
        pass


class Configured(AcceleratorMixin, Asked):
    """An Accelerator with a parallelism config; a real one would need as many ranks."""

    def __init__(self, config):
        self.parallelism_config = config
        self.distributed_type = accelerate.DistributedType.MULTI_GPU
