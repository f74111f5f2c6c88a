"""AcceleratorMixin: Accelerate's loop with dyncp's batches, which all ranks share.

class DynamicAccelerator(AcceleratorMixin, Accelerator):
    pass

accelerator = DynamicAccelerator(gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from dyncp.dataloader import DCPDataLoader, undo_gradient_average
from dyncp.integrations import check_processes
from dyncp.integrations.transformers.functions import NAME

SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # one rank, or averaged gradients


class AcceleratorMixin:
    """Put it before Accelerator. Accelerate assumes that each process has its own batches: it deals
    them out, averages gradients, divides losses by the accumulated batches and steps schedulers
    once per process. Here all ranks share one batch, and losses are shares of the step's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loader: DCPDataLoader | None = None
        accelerator: Any = self
        found = accelerator.distributed_type.value
        if found not in SUPPORTED:
            raise ValueError(
                f"Accelerate's distributed type is {found}; dyncp supports {', '.join(SUPPORTED)}, "
                "whose gradient averages it can undo"
            )
        other = accelerator.parallelism_config
        if other is not None and (other.cp_enabled or other.sp_enabled):
            raise ValueError(
                "Accelerate was asked for context or sequence parallelism (cp_size, sp_size); "
                "dyncp has cut the sequences already: leave these at 1"
            )

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Accelerate's `prepare`; it returns the loader unchanged. Attach models before."""
        for given in objects:
            self._check(given)
        found: Any = super().prepare(*objects, **options)  # type: ignore[misc]
        return found

    def _check(self, given: Any) -> None:
        accelerator: Any = self
        if isinstance(given, DataLoader):
            raise ValueError(
                "prepare got a torch DataLoader, from which Accelerate would give every rank other "
                "batches; under dyncp ranks share a batch: prepare attached.loader(dataset, mask)"
            )
        own = getattr(getattr(given, "config", None), "_attn_implementation", NAME)
        if own != NAME:
            raise ValueError(
                f"prepare got {type(given).__name__} with attention {own!r}: call attach(model) "
                "before"
            )
        if isinstance(given, DCPDataLoader):
            steps, planned = accelerator.gradient_accumulation_steps, given.config
            if planned.accumulation_steps != steps:
                raise ValueError(
                    f"the loader makes optimiser steps of {planned.accumulation_steps} batches and "
                    f"Accelerate of {steps}; give the loader accumulation_steps={steps}"
                )
            self._loader = given

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A step of the optimiser is one step of the scheduler, whatever the number of ranks."""
        prepared: Any = super().prepare_scheduler(scheduler)  # type: ignore[misc]
        prepared.split_batches = True
        return prepared

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backward of a rank's share of the loss, as attached models and `next_token_loss` return
        it: multiplies by what Accelerate divides by."""
        accelerator: Any = self
        self._check_ready()
        whole = undo_gradient_average(loss) * accelerator.gradient_accumulation_steps
        super().backward(whole, **options)  # type: ignore[misc]

    def _check_ready(self) -> None:
        accelerator: Any = self
        check_processes("Accelerate", accelerator.num_processes)
        if not accelerator._models or self._loader is None:
            raise ValueError(
                "backward before prepare(model, optimizer, loader): gradients would not be summed "
                "over ranks, or losses not scaled by the accumulated batches"
            )
