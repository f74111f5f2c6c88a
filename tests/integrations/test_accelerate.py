"""Accelerate's loop under dyncp trains as with dense masks in one process; misuse is refused."""

import os

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="the extra transformers is not installed")
accelerate = pytest.importorskip("accelerate", reason="the extra transformers is not installed")

from accelerate.state import AcceleratorState  # noqa: E402
from benchmarks.parity_models import documents, make_model  # noqa: E402

from dense_training import Trained, check, train_dense  # noqa: E402
from dyncp import DCPExecutor, LoaderTuning, PlannerConfig, masks, sum_over_ranks  # noqa: E402
from dyncp.integrations.accelerate import AcceleratorMixin  # noqa: E402
from dyncp.integrations.transformers import attach  # noqa: E402
from fsdp_on_cpu import use_fsdp, whole  # noqa: E402
from processes import free_port, run_ranks  # noqa: E402
from sizes import pick  # noqa: E402

STEPS, ACCUMULATION, NORM = 10, 2, 0.4
SAMPLES = documents(33, longest=150)  # five batches: the last optimiser step of an epoch has one
OPTIONS = {
    "tokens_per_batch": 400,
    "planner": PlannerConfig(block_size=16),
    "tuning": LoaderTuning(num_planners=0),
}


class DynamicAccelerator(AcceleratorMixin, accelerate.Accelerator):
    pass


def optimizer_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def run_of_rank(rank, folder, port):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "MASTER_PORT": str(port)}
    found = []
    for name in ("ddp", "fsdp"):
        accelerator = DynamicAccelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        if name == "fsdp":
            use_fsdp(accelerator)
        found += train(accelerator, f"{folder}/{name}")
        AcceleratorState._reset_state(reset_partial_state=True)
    return found


def train(accelerator, folder):
    """A whole run, and another one that resumes at its fourth step, within the second epoch."""
    assert accelerator.num_processes == dist.get_world_size()
    model = make_model("gemma3").train()
    loader = attach(model).loader(SAMPLES, masks.causal, accumulation_steps=ACCUMULATION, **OPTIONS)
    prepared = accelerator.prepare(model, *optimizer_of(model), loader)
    run, optimizer, scheduler, same = prepared
    assert same is loader
    accelerator.register_for_checkpointing(loader)
    start, found = loader.state_dict(), []
    executor = DCPExecutor(timeout=60)
    for first in (0, 4):
        losses, rates, total = [], [], torch.zeros((), dtype=torch.float64)
        if first:
            loader.load_state_dict(start)
            accelerator.load_state(folder)
        while len(losses) < STEPS - first:
            for local_data, plan in loader:
                with accelerator.accumulate(run):
                    loss = run(**local_data, dyncp_step=executor.prepare(plan)).loss
                    accelerator.backward(loss)
                    total += loss.detach()
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(run.parameters(), NORM)
                        losses.append(sum_over_ranks(total.clone()).item())
                        rates += scheduler.get_last_lr()
                        total.zero_()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients and len(losses) == 4 - first:
                    accelerator.save_state(folder)
                    accelerator.wait_for_everyone()
                if len(losses) == STEPS - first:
                    break
        found.append(Trained(losses, [whole(parameter) for parameter in run.parameters()], rates))
    executor.close()
    return found


def test_accelerate_under_ddp_and_fsdp_trains_and_resumes_as_dense_attention_does(tmp_path):
    wanted = train_dense("gemma3", SAMPLES, STEPS, ACCUMULATION, NORM, optimizer_of, **OPTIONS)
    ranks = run_ranks(run_of_rank, pick(2, 4), str(tmp_path), free_port(), timeout=200)
    for found in ranks:
        assert [len(run.losses) for run in found] == [STEPS, STEPS - 4] * 2
        for run in found:
            check(run, wanted)


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
