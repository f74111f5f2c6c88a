"""Transformers' Trainer under dyncp: the same run on one rank, on two, and resumed."""

import os
from math import log

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytest.importorskip("accelerate", reason="the extra transformers is not installed")

from accelerate.state import AcceleratorState  # noqa: E402
from benchmarks.parity_models import documents, make_model  # noqa: E402

from dyncp import DCPExecutor, LoaderTuning, PlannerConfig, masks  # noqa: E402
from dyncp.integrations.transformers.trainer import TrainerMixin  # noqa: E402
from processes import run_ranks  # noqa: E402

OPTIONS = {
    "tokens_per_batch": 400,
    "planner": PlannerConfig(block_size=16),
    "tuning": LoaderTuning(num_planners=0),
}


class DynamicTrainer(TrainerMixin, transformers.Trainer):
    pass


def trainer_of(folder, count=24, window=None, **options):
    args = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        average_tokens_across_devices=False,
        **options,
    )
    samples = documents(count, longest=150)
    return DynamicTrainer(
        make_model("gemma3"),
        args,
        train_dataset=samples,
        eval_dataset=samples[:7],
        mask_fn=masks.causal,
        loader_options=OPTIONS | {"tuning": LoaderTuning(num_planners=0, window=window)},
    )


def outcome_of(trainer, **options):
    trainer.train(**options)
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    weights = [p.detach().numpy() for p in trainer.model.parameters()]
    return losses, weights, trainer.evaluate()["eval_loss"], trainer.state.max_steps


def run_of_rank(rank, folder):
    ranks = dist.get_world_size()
    if ranks > 1:
        with pytest.raises(ValueError, match="Trainer runs 1 process and"):
            trainer_of(folder)
        AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}  # unused
    return outcome_of(trainer_of(folder))


def check(found, wanted):
    assert found[0] == pytest.approx(wanted[0][-len(found[0]) :], rel=1e-5)
    for got, expected in zip(found[1], wanted[1], strict=True):
        assert abs(got - expected).max() <= 1e-4 * abs(expected).max()
    assert found[2] == pytest.approx(wanted[2], rel=1e-5)


def test_two_ranks_train_as_one_and_resume_from_a_checkpoint(tmp_path):
    wanted = run_ranks(run_of_rank, 1, str(tmp_path / "one"), timeout=140)[0]
    losses, _, _, steps = wanted
    assert len(losses) == steps >= 4
    assert losses[0] == pytest.approx(log(97), rel=0.15)  # mean over targets, random weights
    found = run_ranks(run_of_rank, 2, str(tmp_path / "two"), timeout=140)[0]
    check(found, wanted)
    trainer = trainer_of(str(tmp_path / "two"))
    resumed = outcome_of(trainer, resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    check(resumed, wanted)


def test_an_incomplete_accumulation_at_the_end_of_an_epoch_is_a_step_of_its_own(tmp_path):
    """The second epoch has another number of batches than the first one."""
    options = {"count": 32, "window": 1, "data_seed": 5}
    losses, weights, _, _ = outcome_of(trainer_of(str(tmp_path), max_grad_norm=0.0, **options))
    trainer = trainer_of(str(tmp_path), **options)
    loader, model, wanted = trainer.get_train_dataloader().loader, trainer.model, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    executor, numbers = DCPExecutor(), []
    for _ in range(2):
        batches, total = list(loader), 0.0
        numbers.append(len(batches))
        for number, (data, plan) in enumerate(batches, start=1):
            loss = model(**data, dyncp_step=executor.prepare(plan)).loss
            loss.backward()
            total += loss.item()
            if number % 2 == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
                wanted.append(total)
                total = 0.0
    assert numbers == [6, 5]
    assert losses == pytest.approx(wanted, rel=1e-5)
    for got, parameter in zip(weights, model.parameters(), strict=True):
        expected = parameter.detach().numpy()
        assert abs(got - expected).max() <= 1e-4 * abs(expected).max()


def test_accumulation_that_trainer_and_loader_count_differently_is_refused(tmp_path):
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, gradient_accumulation_steps=2, max_steps=2
    )
    model = make_model("llama")
    with pytest.raises(ValueError, match="accumulation_steps=1 and TrainingArguments gradient_acc"):
        DynamicTrainer(model, args, mask_fn=masks.causal, loader_options={"accumulation_steps": 1})
    stream = (sample for sample in documents(4))
    options = {"loader_options": {"shuffle": False}}
    trainer = DynamicTrainer(model, args, train_dataset=stream, mask_fn=masks.causal, **options)
    with pytest.raises(ValueError, match="pass loader_options lengths= or drop_last=True"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "this Trainer got label_smoothing_factor"),
        ({}, {"compute_metrics": len}, "this Trainer got compute_metrics"),
        ({}, {"compute_loss_func": len}, "this Trainer got compute_loss_func"),
    ],
)
def test_what_would_see_parts_of_sequences_is_refused(tmp_path, options, more, message):
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
    with pytest.raises(ValueError, match=message):
        DynamicTrainer(torch.nn.Linear(1, 1), args, mask_fn=masks.causal, **more)
