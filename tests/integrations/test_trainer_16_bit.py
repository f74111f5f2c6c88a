"""Trainer with `bf16=True` or `fp16=True` and no further options: as dense masks under the same
autocast in one process, to rounding."""

import os

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytest.importorskip("accelerate", reason="the extra transformers is not installed")

from accelerate.state import AcceleratorState  # noqa: E402
from benchmarks.parity_models import documents, make_model  # noqa: E402

from dense_training import Batches  # noqa: E402
from dyncp import LoaderTuning, PlannerConfig, masks  # noqa: E402
from dyncp.integrations.transformers.trainer import TrainerMixin  # noqa: E402
from fsdp_on_cpu import whole  # noqa: E402
from processes import run_ranks  # noqa: E402
from sizes import full, pick  # noqa: E402

RATE, NORM = 0.05, 0.4
ROUNDING = 5e-3  # of losses; bf16 has 8 bits
SAMPLES = documents(12, longest=120)
OPTIONS = {
    "tokens_per_batch": 300,
    "shuffle": False,
    "planner": PlannerConfig(block_size=16),
    "tuning": LoaderTuning(num_planners=0),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DynamicTrainer(TrainerMixin, transformers.Trainer):
    pass


def run_of_rank(rank, folder, dtype, steps):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}  # unused
    AcceleratorState._reset_state(reset_partial_state=True)
    args = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, optim="sgd", learning_rate=RATE, max_steps=steps,
        lr_scheduler_type="constant", max_grad_norm=NORM, logging_steps=1, report_to=[],
        disable_tqdm=True, save_strategy="no", **{dtype: True},
    )  # fmt: skip
    model = make_model("gemma3")
    trainer = DynamicTrainer(
        model, args, train_dataset=SAMPLES, mask_fn=masks.causal, loader_options=OPTIONS
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [whole(parameter) for parameter in trainer.model.parameters()]


def dense_run(dtype, steps):
    model, losses, batches = make_model("gemma3").train(), [], Batches("gemma3", SAMPLES, **OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    while len(losses) < steps:
        for data, plan in list(batches.loader)[: steps - len(losses)]:
            with torch.autocast("cpu", DTYPES[dtype]):
                loss = batches.loss(model, data, plan)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, [whole(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize(("dtype", "ranks"), [("bf16", 2), full("bf16", 4), full("fp16", 2)])
def test_sixteen_bits_train_as_dense_attention_to_rounding(dtype, ranks, tmp_path):
    steps = pick(4, 10)
    losses, weights = dense_run(dtype, steps)
    for found, others in run_ranks(run_of_rank, ranks, str(tmp_path), dtype, steps):
        assert found == pytest.approx(losses, rel=ROUNDING)
        for got, wanted in zip(others, weights, strict=True):
            assert abs(got - wanted).max() < 2e-2 * abs(wanted).max()
