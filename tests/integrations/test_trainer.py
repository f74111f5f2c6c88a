"""Transformers' Trainer under dyncp: runs as with dense masks in one process, without dyncp."""

import os
from math import log

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytest.importorskip("accelerate", reason="the extra transformers is not installed")

from accelerate.state import AcceleratorState  # noqa: E402
from benchmarks.parity_models import documents, make_model  # noqa: E402

from dense_training import LOSSES, Batches, Trained, check, train_dense  # noqa: E402
from dyncp import LoaderTuning, PlannerConfig, masks  # noqa: E402
from dyncp.integrations.transformers.trainer import TrainerMixin  # noqa: E402
from fsdp_on_cpu import use_fsdp, whole  # noqa: E402
from processes import run_ranks  # noqa: E402
from sizes import pick  # noqa: E402

OPTIONS = {
    "tokens_per_batch": 400,
    "planner": PlannerConfig(block_size=16),
    "tuning": LoaderTuning(num_planners=0),
}


class DynamicTrainer(TrainerMixin, transformers.Trainer):
    pass


class ShardingTrainer(DynamicTrainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        use_fsdp(self.accelerator)
        self.is_fsdp_enabled = True


STEPS, ACCUMULATION, NORM = 10, 2, 0.4
SAMPLES = documents(33, longest=150)  # five batches: the last optimiser step of an epoch has one


def arguments_of(folder, **options):
    options = {
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "learning_rate": 0.05,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    return transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, **options)


def trainer_of(folder, kind=DynamicTrainer, **options):
    args = arguments_of(
        folder,
        max_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=NORM,
        warmup_steps=2,
        lr_scheduler_type="linear",
        eval_strategy="steps",
        eval_steps=3,
        save_steps=4,
        **options,
    )
    data = {"train_dataset": SAMPLES, "eval_dataset": SAMPLES[:7], "loader_options": OPTIONS}
    return kind(make_model("gemma3"), args, mask_fn=masks.causal, **data)


class Predict(transformers.TrainerCallback):
    """Predicts while training goes on."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            self.trainer.predict(SAMPLES[:2])


def outcome_of(trainer, **options):
    callback = Predict()
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train(**options)
    logged = [x for x in trainer.state.log_history if "loss" in x]
    weights = [whole(parameter) for parameter in trainer.model_wrapped.parameters()]
    losses, rates = [x["loss"] for x in logged], [x["learning_rate"] for x in logged]
    evaluated = trainer.evaluate()["eval_loss"]
    return Trained(losses, weights, rates), evaluated, trainer.predict(SAMPLES[:3])


def run_of_rank(rank, folder, resumed):
    ranks = dist.get_world_size()
    with pytest.raises(ValueError, match="Trainer runs 1 process and"):
        trainer_of(folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}  # unused
    found = []
    for name, kind in (("ddp", DynamicTrainer), ("fsdp", ShardingTrainer)):
        path = f"{folder}/{name}"
        options = {"resume_from_checkpoint": f"{path}/checkpoint-4"} if resumed else {}
        found.append(outcome_of(trainer_of(path, kind), **options))
        AcceleratorState._reset_state(reset_partial_state=True)
    return found


def dense_optimizer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 2, STEPS)


@pytest.fixture(scope="module")
def wanted():
    """The run with dense masks: what was trained, the loss of evaluation, and its logits."""
    shuffled = OPTIONS | {"shuffle": True, "seed": 42}
    trained = train_dense("gemma3", SAMPLES, STEPS, ACCUMULATION, NORM, dense_optimizer, **shuffled)
    batches, total, targets = Batches("gemma3", SAMPLES[:7], evaluation=True, **OPTIONS), 0.0, 0
    with torch.no_grad(), batches.loader:
        for data, plan in batches.loader:
            count = data["num_items_in_batch"].item()
            total += batches.loss(trained.model, data, plan).item() * count
            targets += count
        logits = [trained.model(input_ids=s["input_ids"][None]).logits[0] for s in SAMPLES[:3]]
    return trained, total / targets, logits


def check_outcome(found, wanted):
    trained, evaluated, predicted = found
    check(trained, wanted[0])
    assert evaluated == pytest.approx(wanted[1], rel=LOSSES)
    longest = max(len(rows) for rows in wanted[2])
    assert predicted.predictions.shape == (3, longest, 97)
    for got, labels, logits, sample in zip(
        predicted.predictions, predicted.label_ids, wanted[2], SAMPLES, strict=False
    ):
        tokens = sample["input_ids"].tolist()
        assert abs(got[: len(logits)] - logits.numpy()).max() < 1e-4 * logits.abs().max()
        assert labels.tolist() == [*tokens, *[-100] * (longest - len(tokens))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def two_ranks(folder):
    return run_ranks(run_of_rank, 2, str(folder), False, timeout=200)


def test_trainer_under_ddp_and_fsdp_trains_evaluates_and_predicts_as_dense_attention_does(
    two_ranks, wanted
):
    for rank in two_ranks:
        for found in rank:
            check_outcome(found, wanted)
    assert wanted[0].losses[0] == pytest.approx(log(97), rel=0.15)  # random weights


def test_a_run_resumes_on_another_number_of_ranks(two_ranks, folder, wanted):
    assert two_ranks
    if pick(False, True):
        for found in run_ranks(run_of_rank, 4, str(folder), True, timeout=300)[0]:
            check_outcome(found, wanted)
    else:
        checkpoint = str(folder / "ddp" / "checkpoint-4")
        check_outcome(outcome_of(trainer_of(folder), resume_from_checkpoint=checkpoint), wanted)


def epochs_of(folder, seed=5, **options):
    """A trainer whose epochs have 6, 5 and 5 batches (seed 5), or 5, 5 and 6 (seed 2)."""
    args = arguments_of(folder, data_seed=seed, **options)
    tuned = OPTIONS | {"tuning": LoaderTuning(num_planners=0, window=1)}
    data = {"train_dataset": documents(32, longest=150), "loader_options": tuned}
    return DynamicTrainer(make_model("llama"), args, mask_fn=masks.causal, **data)


def test_steps_are_those_of_all_epochs_also_if_a_run_resumes_between_them(tmp_path):
    whole_run = epochs_of(tmp_path, num_train_epochs=2, save_steps=6)
    whole_run.train()
    assert whole_run.state.global_step == whole_run.state.max_steps == 11
    resumed = epochs_of(tmp_path / "resumed", num_train_epochs=2, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.state.global_step == 11
    for got, expected in zip(resumed.model.parameters(), whole_run.model.parameters(), strict=True):
        assert torch.equal(got, expected)
    again = epochs_of(tmp_path / "again", num_train_epochs=2, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-11"))
    assert again.state.global_step == 11
    (tmp_path / "checkpoint-6" / "dyncp_loader.json").unlink()
    with pytest.raises(ValueError, match="it was not saved by a Trainer under dyncp"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_an_incomplete_accumulation_at_the_end_of_a_shorter_epoch_is_a_step(tmp_path):
    trainer = epochs_of(
        tmp_path, num_train_epochs=2, gradient_accumulation_steps=2, save_strategy="no"
    )
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps == 6
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"num_train_epochs": 3}, 16), ({"num_train_epochs": 1.5}, 8), ({"max_steps": 11}, 11)],
)
def test_the_schedule_is_as_long_as_training(tmp_path, options, steps):
    trainer = epochs_of(tmp_path, seed=2, save_strategy="no", **options)
    values = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    assert values[-1] == steps
    assert values[0] >= steps / 6


def test_accumulation_that_trainer_and_loader_count_differently_is_refused(tmp_path):
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, gradient_accumulation_steps=2, max_steps=2
    )
    model = make_model("llama")
    with pytest.raises(ValueError, match="accumulation_steps=1 and TrainingArguments gradient_acc"):
        DynamicTrainer(model, args, mask_fn=masks.causal, loader_options={"accumulation_steps": 1})
    changed = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, accelerator_config={
            "gradient_accumulation_kwargs": {"num_steps": 2}
        },
    )  # fmt: skip
    options = {"mask_fn": masks.causal, "loader_options": {"accumulation_steps": 1}}
    with pytest.raises(ValueError, match="accumulation_steps=1 and TrainingArguments gradient_acc"):
        DynamicTrainer(make_model("llama"), changed, **options)
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
        ({"neftune_noise_alpha": 5.0}, {}, "this Trainer got neftune_noise_alpha"),
        ({"dataloader_drop_last": True}, {}, "pass loader_options drop_last=True"),
        ({"ignore_data_skip": True}, {}, "has no effect: the loader's state is loaded"),
    ],
)
def test_what_would_see_parts_of_sequences_is_refused(tmp_path, options, more, message):
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
    with pytest.raises(ValueError, match=message):
        DynamicTrainer(torch.nn.Linear(1, 1), args, mask_fn=masks.causal, **more)
