"""A check of the first optimiser steps: are the gradients that an optimiser gets the sums over all
ranks, and are the weights of all ranks equal?

Equal gradients are not enough: an average is equal on all ranks, too. So tensor hooks on a few
parameters catch this rank's own contributions before anything reduces them, and the sum of these
over ranks is compared with what the optimiser gets.

    look     at an optimiser's step
    first    chooses parameters and hooks them; remembers how the weights began
    later    if attention ran in the backward passes since the last look, ranks compare weights,
             gradients and sums

Optimisers of models that do not call attention are left alone. Everything that a look decides comes
from reductions over ranks, so all ranks raise together.
"""

import logging
import math
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dyncp.gradients.sharded import Sharded, sharded_parameters
from dyncp.gradients.sums import LISTENERS, data_groups, local_part

logger = logging.getLogger(__name__)

LOOKS = 4  # of which the first one compares nothing
STEPS = 16  # until an optimiser that has nothing to do with attention is left alone
CHOSEN = 8  # parameters whose contributions are caught
LARGEST = 1 << 18  # elements of such a parameter, if there are smaller ones
SAME = 1e-2  # relative: sums in 16 bits; what is wrong is at least a factor of 1.25
CLOSE = 1e-3  # relative: an average or a double sum that something else may scale
ALIKE = 1e-6  # relative: sums over equal weights
STRAY = 0.1  # relative: sums in 16 bits differ by less
ABOUT = "see docs/training.md, loss and gradients"


class GradientCheck:
    """The check of one executor's models. `group` is as in `sum_gradients`. `ran` says that
    attention ran backward."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._watched: weakref.WeakKeyDictionary[Optimizer, Watched] = weakref.WeakKeyDictionary()
        self._tasks: deque[int] = deque(maxlen=1024)  # backward passes in which attention ran
        look = partial(_look, weakref.ref(self))
        self._handle = register_optimizer_step_pre_hook(look)
        weakref.finalize(self, self._handle.remove)
        LISTENERS.add(self)

    def ran(self) -> None:
        """Attention ran in the current backward pass."""
        self._tasks.append(torch._C._current_graph_task_id())

    def close(self) -> None:
        self._handle.remove()
        LISTENERS.discard(self)
        for watched in self._watched.values():
            watched.release()

    def summed(self, model: nn.Module) -> None:
        """`sum_gradients` has summed the gradients of this model."""
        parameters = {id(parameter) for parameter in model.parameters()}
        for watched in self._watched.values():
            if watched.hooks and watched.tasks.intersection(self._tasks):
                watched.summed(parameters)

    def look(self, optimizer: Optimizer) -> None:
        """An optimiser is about to step."""
        if torch._C._current_graph_task_id() != -1:
            return  # an optimiser that steps within backward
        watched = self._watched.get(optimizer)
        if watched is None and self._tasks:
            self._watched[optimizer] = Watched(optimizer, data_groups(self._group))
        elif watched is not None and watched.hooks:
            if watched.tasks.intersection(self._tasks):
                watched.look()
            watched.reset()


def _look(check: "weakref.ref[GradientCheck]", optimizer: Optimizer, *_: Any) -> None:
    found = check()
    if found is not None:
        found.look(optimizer)


class Held(NamedTuple):
    """A parameter of an optimiser."""

    name: str
    parameter: Tensor
    sharded: Sharded | None

    def groups(self, groups: list[Any]) -> list[Any]:
        """Those among the groups whose ranks should hold the same part of this parameter."""
        if self.sharded is None:
            return groups
        ranks = self.sharded.ranks
        alike = [g for g in groups if len(ranks.intersection(dist.get_process_group_ranks(g))) <= 1]
        return alike if self.sharded.copies is None else [*alike, self.sharded.copies]

    @property
    def leaf(self) -> Tensor | None:
        """What layers use."""
        return self.parameter if self.sharded is None else self.sharded.whole


class Watched:
    """What is known of one optimiser."""

    def __init__(self, optimizer: Optimizer, groups: list[Any]) -> None:
        self._groups = groups
        self.looks = self.steps = 1
        self.tasks: set[int] = set()  # backward passes that reached its parameters
        self._held = list(_parameters_of(optimizer))
        self._caught: dict[int, Tensor] = {}  # this rank's contributions, by number
        self.hooks = [self._hook(number) for number in self._choose()]
        self._began = [_sums(held.parameter) for held in self._held]
        self._ratios: list[float] = []  # of gradients that sum_gradients has not summed
        self._summed: set[int] = set()  # numbers of parameters that sum_gradients has summed

    def _choose(self) -> list[int]:
        """Some parameters, from all parts of the model."""
        sizes = {n: held.leaf.numel() for n, held in enumerate(self._held) if held.leaf is not None}
        small = [n for n, size in sizes.items() if size <= LARGEST] or list(sizes)[:1]
        return small[:: -(-len(small) // CHOSEN)]

    def _hook(self, number: int) -> Any:
        leaf: Any = self._held[number].leaf
        return leaf.register_hook(partial(self._catch, number))

    def _catch(self, number: int, gradient: Tensor) -> None:
        self.tasks.add(torch._C._current_graph_task_id())
        own = gradient.detach().to(torch.float64, copy=True)
        self._caught[number] = self._caught[number] + own if number in self._caught else own

    def reset(self) -> None:
        """Forgets the contributions of the step that is about to be made."""
        self._caught.clear()
        self.tasks.clear()
        self._summed.clear()
        self.steps += 1
        if self.looks >= LOOKS or self.steps >= STEPS:
            self.release()

    def release(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def look(self) -> None:
        self.looks += 1
        if not self._is_comparable():
            self.release()
            return
        self._compare("weights", [_sums(held.parameter) for held in self._held])
        self._compare("gradients", [_sums(_gradient(held)) for held in self._held])
        others = {*range(len(self._held))} - self._summed
        if others:
            self._judge_scale(*self._compare_with_contributions(others))

    def summed(self, parameters: set[int]) -> None:
        """Raises if the gradients of these parameters, by id, are not the sums."""
        own = {n for n, held in enumerate(self._held) if id(held.parameter) in parameters}
        if own and self._is_comparable():
            self._summed |= own
            ratio, stray = self._compare_with_contributions(own)
            if abs(ratio - 1) > SAME or stray > STRAY:
                raise ValueError(
                    f"the gradients that sum_gradients made are {ratio:.4g} times the sum of what "
                    "backward computed on all ranks with different tokens. Either its group leaves "
                    "out some of these ranks: call sum_gradients(model, mesh). Or the gradients "
                    "had something else in them: those of the step before (call optimizer."
                    "zero_grad()), or a sum over ranks by a communication hook of DDP or your own "
                    f"all-reduce. Clip them afterwards; {ABOUT}"
                )

    def _is_comparable(self) -> bool:
        """Whether all ranks have the same parameters, which ZeroRedundancyOptimizer and FSDP1 do
        not give them."""
        flattened = any(hasattr(held.parameter, "_fsdp_flattened") for held in self._held)
        count = float(len(self._held)) if not flattened else -float(dist.get_rank())
        found = torch.tensor([count, -count], device=self._device, dtype=torch.float64)
        most, least = _reduce(found, self._groups).tolist()
        if most != -least:
            logger.info("this optimiser has different parameters on each rank: not checked")
        return bool(most == -least)

    @property
    def _device(self) -> torch.device:
        return self._held[0].parameter.device

    def _compare(self, what: str, found: list[Tensor]) -> None:
        """Raises if weights or gradients differ between ranks that should have the same."""
        for number in self._unequal(found):
            began = next(iter(self._unequal(self._began)), None)
            if what == "weights" and began is not None:
                raise ValueError(
                    f"ranks began training with different weights: {self._held[began].name}. Make "
                    "the model from the same seed on all ranks, or load or broadcast the weights "
                    f"of one rank, also those of adapters; {ABOUT}"
                )
            raise ValueError(
                f"ranks have different {what} of {self._held[number].name}: its gradients were not "
                "summed over all ranks; call sum_gradients(model) once per optimiser step, after "
                "the last backward, whatever wraps the model (with a DeviceMesh: sum_gradients("
                f"model, mesh)); {ABOUT}"
            )

    def _unequal(self, found: list[Tensor]) -> Iterator[int]:
        """Numbers of parameters whose sums differ between ranks."""
        by_groups: dict[tuple[Any, ...], list[int]] = {}
        for number, held in enumerate(self._held):
            by_groups.setdefault(tuple(held.groups(self._groups)), []).append(number)
        for groups, numbers in by_groups.items():
            values = torch.stack([found[number] for number in numbers])
            least, most = _reduce(values, groups, dist.ReduceOp.MIN), _reduce(values, groups)
            differ = (most - least) > ALIKE * torch.maximum(most.abs(), least.abs())
            told = _reduce(differ.any(dim=1).double(), self._groups)
            yield from (numbers[row] for row in told.nonzero().flatten().tolist())

    def _compare_with_contributions(self, numbers: set[int]) -> tuple[float, float]:
        """How many times the sum over ranks of what backward computed the gradients of these
        parameters are, and their distance from that multiple, relative to it."""
        has = [
            n in numbers and n in self._caught and held.parameter.grad is not None
            for n, held in enumerate(self._held)
        ]
        mask = torch.tensor(has, dtype=torch.float64, device=self._device)
        common = _reduce(mask, self._groups, dist.ReduceOp.MIN).nonzero().flatten().tolist()
        if not common:
            return 1.0, 0.0
        total = torch.cat([_whole(self._caught[number]).flatten() for number in common])
        for one in self._groups:
            dist.all_reduce(total, group=one)
        gradients: list[Any] = [self._held[number].parameter.grad for number in common]
        found = torch.cat([_whole(gradient.detach().double()).flatten() for gradient in gradients])
        size = float(total @ total)
        if not size:
            return 1.0, 0.0  # a step without targets
        ratio = float(found @ total) / size
        distance = float((found - ratio * total).norm()) / size**0.5
        return ratio, distance / max(abs(ratio), 1e-30)

    def _judge_scale(self, ratio: float, stray: float) -> None:
        """Raises if gradients that sum_gradients has not made are averages or double sums. Clipping
        scales gradients, too, but hardly by such a factor in every step."""
        self._ratios.append(ratio)
        sizes = [dist.get_world_size(one) for one in self._groups]
        factors = {float(size) for size in (*sizes, math.prod(sizes)) if size > 1}
        wrong = [
            factor
            for factor in (*factors, *(1 / factor for factor in factors))
            if all(abs(found / factor - 1) < CLOSE for found in self._ratios)
        ]
        if wrong and self.looks == LOOKS and stray <= STRAY:
            raise ValueError(
                f"the gradients of this optimiser are {wrong[0]:.4g} times the sum over ranks of "
                "what backward computed: DDP or FSDP averaged them, or they were summed twice; "
                "call sum_gradients(model) once per optimiser step, after the last backward, "
                f"whatever wraps the model; {ABOUT}"
            )


def _parameters_of(optimizer: Optimizer) -> Iterator[Held]:
    sharded = sharded_parameters(list(_module_state_mapping))
    for group in optimizer.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=False):
            if parameter.requires_grad:
                shape = "x".join(map(str, parameter.shape))
                text = name or f"a parameter [{shape}]"
                yield Held(text, parameter, sharded.get(id(parameter)))


def _gradient(held: Held) -> Tensor:
    gradient = held.parameter.grad
    return torch.zeros(1, device=held.parameter.device) if gradient is None else gradient


def _sums(tensor: Tensor) -> Tensor:
    """Two numbers that differ if this rank's part of a tensor differs."""
    part = local_part(tensor.detach())
    total = part.sum(dtype=torch.float64)
    return torch.stack([total, torch.linalg.vector_norm(part, dtype=torch.float64)]).nan_to_num()


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _reduce(values: Tensor, groups: Any, how: Any = dist.ReduceOp.MAX) -> Tensor:
    values = values.clone()
    for one in groups:
        dist.all_reduce(values, how, group=one)
    return values
