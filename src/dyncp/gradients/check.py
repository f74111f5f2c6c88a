"""A check of the first optimiser steps: are the gradients that an optimiser gets those of the
step's loss, and are the weights of all ranks equal?

Equal gradients are not enough: an average is equal on all ranks, too. So tensor hooks on a few
parameters catch this rank's own contributions before anything reduces them, and the sum of these
over ranks is compared with the gradients when backward has ended, after `sum_gradients`, and when
the optimiser gets them. Hooks on losses catch by what they were multiplied before backward.

    look     at an optimiser's step
    first    chooses parameters and hooks them; remembers how the weights began
    later    if attention ran in the backward passes since the last look, ranks compare weights,
             gradients and sums

Optimisers of models that do not call attention are left alone. Everything that a look decides comes
from reductions over ranks, so all ranks raise together.
"""

import logging
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dyncp.gradients.events import BATCHES, LISTENERS, MicroBatch
from dyncp.gradients.judge import LOOKS, idle_error
from dyncp.gradients.sums import data_groups
from dyncp.gradients.watched import Watched

logger = logging.getLogger(__name__)

STEPS = 16  # until an optimiser that has nothing to do with attention is left alone
PASSES = 1024  # backward passes that are remembered


class BackwardPass(NamedTuple):
    """A backward pass in which attention ran."""

    batches: set[MicroBatch]
    factors: list[Tensor]  # by which losses were multiplied


class GradientCheck:
    """The check of one executor's models. `group` is as in `sum_gradients`. Unless it `is_known` to
    have all ranks with different tokens, the mesh of the batches is used, and nothing is checked if
    they have none."""

    def __init__(self, group: Any, *, is_known: bool) -> None:
        self._group, self._is_known = group, is_known
        self._watched: weakref.WeakKeyDictionary[Optimizer, Watched] = weakref.WeakKeyDictionary()
        self._passes: OrderedDict[int, BackwardPass] = OrderedDict()
        self._factors: tuple[int, list[Tensor]] = (-1, [])  # of the latest loss, and its pass
        self._has_warned = False
        look = partial(_look, weakref.ref(self))
        self._handle = register_optimizer_step_pre_hook(look)
        weakref.finalize(self, self._handle.remove)
        LISTENERS.add(self)

    def multiplied(self, gradient: Tensor) -> None:
        """The gradient of a loss: what it was multiplied by before backward."""
        task = torch._C._current_graph_task_id()
        if task != self._factors[0]:
            self._factors = task, []
        self._factors[1].append(gradient)

    def ran(self, plan: Any) -> None:
        """Attention of this plan runs backward. Layers that are checkpointed with reentrant
        autograd have passes of their own, which begin after that of their loss."""
        task = torch._C._current_graph_task_id()
        found = self._passes.setdefault(task, BackwardPass(set(), self._factors[1]))
        if plan in BATCHES:
            found.batches.add(BATCHES[plan])
            mesh = BATCHES[plan].mesh
            if not self._is_known and mesh is not None and mesh.size() == dist.get_world_size():
                self._group, self._is_known = mesh, True
        while len(self._passes) > PASSES:
            self._passes.popitem(last=False)

    def close(self) -> None:
        self._handle.remove()
        LISTENERS.discard(self)
        for watched in self._watched.values():
            watched.release()

    def summed(self, model: nn.Module) -> None:
        """`sum_gradients` has summed the gradients of this model."""
        parameters = {id(parameter) for parameter in model.parameters()}
        for watched in self._watched.values():
            if watched.hooks and self._of(watched):
                watched.summed(parameters)

    def look(self, optimizer: Optimizer) -> None:
        """An optimiser is about to step."""
        task = torch._C._current_graph_task_id()
        if task != -1:
            self._warn_within(task)
            return
        watched = self._watched.get(optimizer)
        if watched is None and self._passes and self._is_known:
            made = Watched(optimizer, data_groups(self._group))
            if made.hooks:
                self._watched[optimizer] = made
        elif watched is not None and watched.hooks:
            passes = self._of(watched)
            if passes:
                batches = {batch for one in passes for batch in one.batches}
                factors = [float(factor) for one in passes for factor in one.factors]
                watched.look(batches, factors, float(getattr(optimizer, "grad_scale", None) or 1))
            elif watched.is_idle and not any(one.looks > 1 for one in self._watched.values()):
                raise idle_error()
            watched.reset()
            if watched.looks >= LOOKS or watched.steps >= STEPS:
                watched.release()

    def _warn_within(self, task: int) -> None:
        """An optimiser steps during backward, before anything can sum its gradients."""
        if task in self._passes and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "an optimiser steps during backward, where its gradients are not checked: unless "
                "FSDP2 or a hook of yours has summed them over ranks, ranks train different weights"
            )

    def _of(self, watched: Watched) -> list[BackwardPass]:
        return [self._passes[task] for task in watched.tasks if task in self._passes]


def _look(check: "weakref.ref[GradientCheck]", optimizer: Optimizer, *_: Any) -> None:
    found = check()
    if found is not None:
        found.look(optimizer)
