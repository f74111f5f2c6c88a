"""AcceleratorMixin: Accelerate's training loop with dyncp's batches, which all ranks share.

class DynamicAccelerator(AcceleratorMixin, Accelerator):
    pass

accelerator = DynamicAccelerator(gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from dyncp.dataloader import DCPDataLoader
from dyncp.gradients import times_ranks
from dyncp.integrations import check_processes
from dyncp.integrations.transformers.functions import NAME

SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # a single rank, or averaged gradients


def check_accelerator(accelerator: Any) -> None:
    """Raises ValueError if Accelerate does something to gradients or sequences that dyncp does not
    know."""
    found = accelerator.distributed_type.value
    if found not in SUPPORTED:
        raise ValueError(
            f"Accelerate's distributed type is {found}; dyncp supports {', '.join(SUPPORTED)}, "
            "whose gradient averages it can undo"
        )
    other = accelerator.parallelism_config
    if other is not None and (other.cp_enabled or other.sp_enabled):
        raise ValueError(
            "Accelerate was configured with context or sequence parallelism (cp_size, "
            "sp_size), but dyncp already splits the sequences; set both sizes to 1"
        )


class AcceleratorMixin:
    """Adapts Accelerate to dyncp; name it before Accelerator among the base classes.

    Accelerate assumes that each process has its own batches: it distributes them, averages
    gradients, divides losses by the number of accumulated batches, and steps schedulers once per
    process. Under dyncp all ranks share one batch, and a rank's loss is a share of the step's loss.
    """

    # Attributes of Accelerator.
    distributed_type: Any
    parallelism_config: Any
    gradient_accumulation_steps: int
    gradient_state: Any
    num_processes: int
    _models: list[Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loader: DCPDataLoader | None = None
        check_accelerator(self)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Accelerate's `prepare`, which returns the loader unchanged. Call attach(model) first."""
        for given in objects:
            self._check(given)
        return super().prepare(*objects, **options)  # type: ignore[misc]

    def _check(self, given: Any) -> None:
        if isinstance(given, DataLoader):
            raise ValueError(
                "prepare got a torch DataLoader, whose batches Accelerate would distribute over "
                "ranks; under dyncp all ranks share a batch: prepare attached.loader(dataset, mask)"
            )
        own = getattr(getattr(given, "config", None), "_attn_implementation", NAME)
        if own != NAME:
            raise ValueError(
                f"prepare got {type(given).__name__} with attention {own!r}: call attach(model) "
                "first"
            )
        if isinstance(given, DCPDataLoader) and not given.config.evaluation:
            if self._loader is not None and self._loader is not given:
                raise ValueError(
                    "prepare got a second training loader; Accelerate accumulates the batches of "
                    "one. Pass evaluation=True to loaders for evaluation"
                )
            steps, planned = self.gradient_accumulation_steps, given.config.accumulation_steps
            if planned != steps:
                raise ValueError(
                    f"the loader plans optimiser steps of {planned} batches and Accelerate makes "
                    f"steps of {steps}; give the loader accumulation_steps={steps}"
                )
            self._loader = given

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Makes a scheduler step once per optimiser step, whatever the number of ranks."""
        prepared: Any = super().prepare_scheduler(scheduler)  # type: ignore[misc]
        prepared.split_batches = True
        return prepared

    def _do_sync(self) -> None:
        """Lets the loader decide when an optimiser step ends: counting batches, as Accelerate does,
        would misplace the incomplete one at the end of an epoch, and those after it."""
        if self._loader is None:
            super()._do_sync()  # type: ignore[misc]
        else:
            self.gradient_state._set_sync_gradients(self._loader.completes_update)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backward of a rank's share of the loss, as returned by attached models and
        `next_token_loss`. First multiplies it by all that Accelerate will divide by: the ranks and
        the accumulated batches."""
        check_processes("Accelerate", self.num_processes)
        if not self._models or self._loader is None:
            raise ValueError(
                "backward was called before prepare(model, optimizer, loader): gradients would not "
                "be summed over ranks, or losses not scaled by the accumulated batches"
            )
        whole = times_ranks(loss) * self.gradient_accumulation_steps
        super().backward(whole, **options)  # type: ignore[misc]
