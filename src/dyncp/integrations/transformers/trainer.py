"""TrainerMixin: Transformers' Trainer with dyncp's loader, loss, evaluation and resuming.

class DynamicTrainer(TrainerMixin, Trainer):
    pass

trainer = DynamicTrainer(model, args, train_dataset=samples, mask_fn=masks.causal,
                         loader_options={"tokens_per_batch": 65_536})
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import torch

from dyncp.dataloader import DCPDataLoader
from dyncp.executor import DCPExecutor, Step
from dyncp.gradients import sum_over_ranks, times_ranks
from dyncp.integrations import check_processes
from dyncp.integrations.accelerate import check_accelerator
from dyncp.integrations.transformers.attach import Attached, attach
from dyncp.integrations.transformers.predictions import Predictions
from dyncp.samples import num_targets
from dyncp.topology import data_dimensions

PLAN = "dyncp_plan"
STATE_FILE = "dyncp_loader.json"


class Batches:
    """The loader in the form that Trainer expects: one dict per batch, which includes the plan."""

    def __init__(self, loader: DCPDataLoader, dataset: Any) -> None:
        self.loader, self.dataset, self.batch_sampler = loader, dataset, None

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Nothing: after an epoch the loader is at the next one, and may have resumed in another
        one than Trainer has counted."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for local_data, plan in self.loader:
            yield local_data | {PLAN: plan}


class TrainerMixin:
    """Adapts Trainer to dyncp; name it before Trainer among the base classes.

    `mask_fn` returns the mask of a sample. `loader_options` are options of `DCPDataLoader`.
    `attached` is the result of `attach(model)`, if that was called before.

    The loader decides the batches: set `tokens_per_batch`; `per_device_train_batch_size` has no
    effect. The loss is normalised by the targets of all ranks and accumulated batches, whatever
    `average_tokens_across_devices` says.
    """

    # Attributes of Trainer.
    args: Any
    state: Any
    accelerator: Any
    model_wrapped: Any
    preprocess_logits_for_metrics: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        mask_fn: Any,
        loader_options: Mapping[str, Any] | None = None,
        attached: Attached | None = None,
        **options: Any,
    ) -> None:
        _check_mesh((loader_options or {}).get("group"))
        _check_accumulation(args, loader_options or {})
        _check_arguments(args, options)
        self._attached = attach(model) if attached is None else attached
        self._mask_fn, self._loader_options = mask_fn, dict(loader_options or {})
        self._batches: Batches | None = None
        super().__init__(model, args, **options)  # type: ignore[call-arg]
        _check_accumulation(args, self._loader_options)  # args may have changed
        self.loss_is_scaled_for_ga = True  # accumulation is part of num_items_in_batch
        check_accelerator(self.accelerator)
        check_processes("Trainer", self.accelerator.num_processes)

    def get_train_dataloader(self) -> Batches:
        """The training loader, which is made only once."""
        if self._batches is None:
            defaults = {
                "accumulation_steps": self.args.gradient_accumulation_steps,
                "shuffle": True,
                "seed": self.args.seed if self.args.data_seed is None else self.args.data_seed,
            }
            self._batches = self._make_batches(self.train_dataset, defaults | self._loader_options)
            _check_length(self._batches, self.args.gradient_accumulation_steps)
        return self._batches

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Batches:
        """A loader over all of `eval_dataset` (default: the trainer's own)."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        options = {"evaluation": True, "sample_ids": True} | self._loader_options
        for name in ("accumulation_steps", "batch_sampler", "lengths", "sampler", "shuffle"):
            options.pop(name, None)
        return self._make_batches(dataset, options)

    def get_test_dataloader(self, test_dataset: Any) -> Batches:
        """A loader over all of `test_dataset`, for `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def _make_batches(self, dataset: Any, options: dict[str, Any]) -> Batches:
        options = {"executor": self._executor} | options
        return Batches(self._attached.loader(dataset, self._mask_fn, **options), dataset)

    @cached_property
    def _executor(self) -> DCPExecutor:
        return DCPExecutor(self._loader_options.get("group"), device=self.args.device)

    def _get_num_items_in_batch(self, *_: Any) -> None:
        """Returns None, because batches already contain `num_items_in_batch`."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """This rank's share of the step's loss, times the number of ranks, because Trainer averages
        over ranks: both the gradients and the logged loss are then those of the step."""
        outputs = self._run(model, inputs)[1]
        loss = times_ranks(outputs.loss)
        return (loss, outputs) if return_outputs else loss

    def _run(self, model: Any, inputs: dict[str, Any]) -> tuple[Step, Any]:
        given = {name: inputs[name] for name in inputs if name not in (PLAN, "sample_ids")}
        step = self._executor.prepare(inputs[PLAN])
        return step, model(**given, dyncp_step=step)

    def evaluation_loop(
        self,
        dataloader: Batches,
        description: str,  # noqa: ARG002
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,  # noqa: ARG002
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Computes the mean loss over all targets of the dataset and, for `predict`, the logits of
        its samples, the same on all ranks."""
        from transformers.trainer_utils import EvalLoopOutput

        loss_only = prediction_loss_only
        loss_only = self.args.prediction_loss_only if loss_only is None else loss_only
        predictions = Predictions(self.preprocess_logits_for_metrics)
        model = self.model_wrapped
        model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad(), dataloader.loader:
            for inputs in dataloader:
                moved: Any = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
                step, output = self._run(model, moved)
                total[0] += output.loss.double().cpu() * inputs["num_items_in_batch"]
                total[1] += num_targets(inputs)
                if not loss_only:
                    predictions.add(step, output.logits, moved["labels"], moved["sample_ids"])
        summed, targets = sum_over_ranks(total.to(self.args.device)).tolist()
        metrics = {f"{metric_key_prefix}_loss": summed / max(targets, 1.0)}
        group = self._loader_options.get("group")
        arrays = (None, None) if loss_only else predictions.arrays(group)
        return EvalLoopOutput(*arrays, metrics, len(dataloader.dataset))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        if self.args.should_save and self._batches is not None:
            folder = Path(self._get_output_dir(trial=trial))  # type: ignore[attr-defined]
            file = folder / f"checkpoint-{self.state.global_step}" / STATE_FILE
            file.write_text(json.dumps(self._batches.loader.state_dict()), encoding="utf-8")

    def set_initial_training_values(self, args: Any, dataloader: Batches) -> tuple[Any, ...]:
        """Counts the optimiser steps of all epochs, since epochs may have different numbers of
        batches: Trainer would take all of them to be as long as the first one."""
        dataloader.loader.set_epoch(0)
        epochs, *others, steps = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        if args.max_steps > 0:
            epochs = max(epochs, steps)  # an epoch has one or more
        elif dataloader.loader.config.samples.order is None:
            steps = self._count_steps(dataloader.loader, args.num_train_epochs)
        return (epochs, *others, steps)

    def _count_steps(self, loader: DCPDataLoader, epochs: float) -> int:
        steps = 0
        for epoch in range(ceil(epochs)):
            loader.set_epoch(epoch)
            steps += ceil(min(1.0, epochs - epoch) * self._updates_of(loader))
        loader.set_epoch(0)
        return steps

    def _updates_of(self, loader: DCPDataLoader) -> int:
        """The optimiser steps that are left in the loader's epoch."""
        steps: int = self.args.gradient_accumulation_steps
        return -(-loader.remaining // steps)

    def _init_training_state(
        self, max_steps: int, updates: int, epochs: int, folder: str | None, trial: Any
    ) -> tuple[int, int]:
        """Resumes at the loader's saved state. Trainer would find the epoch by dividing steps by
        those of the first epoch, and skip batches one by one."""
        begun = super()._init_training_state(max_steps, updates, epochs, folder, trial)  # type: ignore[misc]
        if folder is None:
            return begun[0], begun[1]
        loader = self.get_train_dataloader().loader
        loader.load_state_dict(_saved_state(Path(folder) / STATE_FILE))
        with suppress(TypeError):  # the number of batches is unknown, see `_check_length`
            if not loader.remaining:  # saved after the last batch of an epoch
                loader.set_epoch(loader.epoch + 1)
        return loader.epoch, 0

    def _run_epoch(self, **options: Any) -> None:
        """Gives Trainer this epoch's number of batches, or what is left of them in the epoch that
        is resumed."""
        loader = self.get_train_dataloader().loader
        loader.set_epoch(options["epoch"])  # keeps a state that was loaded
        with suppress(TypeError):
            options["steps_in_epoch"] = loader.remaining
            options["num_update_steps_per_epoch"] = self._updates_of(loader)
        super()._run_epoch(**options)  # type: ignore[misc]


def _saved_state(file: Path) -> Any:
    if not file.exists():
        raise ValueError(
            f"{file.parent} has no {STATE_FILE}: it was not saved by a Trainer under dyncp, so the "
            "next batch is unknown; train from its weights, without resume_from_checkpoint"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def _check_mesh(mesh: Any) -> None:
    """Raises ValueError if processes share tokens: Trainer averages gradients over all of them."""
    for name in getattr(mesh, "mesh_dim_names", None) or ():
        if name not in data_dimensions(mesh) and mesh[name].size() > 1:
            raise ValueError(
                f"the mesh has {mesh[name].size()} ranks in dimension {name!r}, with the same "
                "tokens, but Trainer assumes that all processes have different tokens; use only "
                "dimensions dp... and 'cp', or write your own loop (docs/parallelism.md)"
            )


def _check_accumulation(args: Any, options: Mapping[str, Any]) -> None:
    steps = args.gradient_accumulation_steps
    planned = options.get("accumulation_steps", steps)
    if planned != steps:
        raise ValueError(
            f"loader_options have accumulation_steps={planned} and TrainingArguments "
            f"gradient_accumulation_steps={steps}: losses would be divided by the targets of "
            f"{planned} batches, and {steps} be accumulated. Leave out accumulation_steps"
        )


def _check_length(batches: "Batches", steps: int) -> None:
    """Raises ValueError if an epoch may end with an incomplete optimiser step where Trainer does
    not see it."""
    config = batches.loader.config
    if steps == 1 or config.drop_last:
        return
    try:
        len(batches)
    except TypeError as error:
        raise ValueError(
            f"Trainer accumulates {steps} batches, and the number of batches of an epoch is "
            "unknown, so it would keep the gradients of an incomplete last step for the next "
            "epoch; pass loader_options lengths= or drop_last=True"
        ) from error


def _check_arguments(args: Any, options: Mapping[str, Any]) -> None:
    parts = "cannot handle ranks that hold parts of sequences"
    refused = {
        "label_smoothing_factor": (args.label_smoothing_factor, parts),
        "neftune_noise_alpha": (args.neftune_noise_alpha, parts),
        "compute_loss_func": (options.get("compute_loss_func"), parts),
        "compute_metrics": (options.get("compute_metrics"), parts),
        "data_collator": (options.get("data_collator"), parts),
        "auto_find_batch_size": (args.auto_find_batch_size, "has no effect on dyncp's loader"),
        "dataloader_drop_last": (
            args.dataloader_drop_last,
            "has no effect on dyncp's loader: pass loader_options drop_last=True",
        ),
        "ignore_data_skip": (args.ignore_data_skip, "has no effect: the loader's state is loaded"),
        "n_gpu > 1 (DataParallel)": (args.n_gpu > 1, parts),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise ValueError(f"this Trainer got {name}, which {reason}; leave it out")
