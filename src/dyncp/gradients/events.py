"""What checks of gradients hear from other stages: batches, losses, and sums of gradients."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Checks that run: `summed(model)`, `multiplied(gradient of a loss)`.
LISTENERS: weakref.WeakSet[Any] = weakref.WeakSet()


class MicroBatch(NamedTuple):
    """A batch of a loader; one or several of them make an update."""

    loader: int
    update: int
    number: int  # of the batch
    completes: bool  # its update
    mesh: Any  # the loader's, if it has several dimensions


BATCHES: weakref.WeakKeyDictionary[Any, MicroBatch] = weakref.WeakKeyDictionary()


class YieldedBatches:
    """Says which batches of a loader make an optimiser step."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh if getattr(mesh, "ndim", 1) > 1 else None
        self._count, self._updates = 0, 0

    def begin(self) -> None:
        """An iteration begins, with a new optimiser step."""
        self._updates += 1

    def add(self, plan: Any, *, completes: bool) -> None:
        """A batch is yielded; `completes` its optimiser step."""
        self._count += 1
        BATCHES[plan] = MicroBatch(id(self), self._updates, self._count, completes, self._mesh)
        self._updates += completes


def watch_loss(loss: Tensor) -> Tensor:
    """Lets checks see by what this rank's share of a loss is multiplied before backward. A compiled
    graph cannot have such a hook."""
    if not torch.compiler.is_compiling() and LISTENERS and loss.requires_grad:
        loss.register_hook(_tell_factor)  # type: ignore[no-untyped-call]
    return loss


def _tell_factor(gradient: Tensor) -> None:
    for listener in list(LISTENERS):
        listener.multiplied(gradient.detach())
