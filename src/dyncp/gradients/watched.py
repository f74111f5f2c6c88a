"""One optimiser under a check of gradients: its parameters, what backward contributes to a few of
them, and comparisons over ranks."""

import logging
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed._composable_state import _module_state_mapping
from torch.optim import Optimizer

from dyncp.gradients.events import MicroBatch
from dyncp.gradients.judge import (
    ABOUT,
    Measured,
    Scales,
    factors_error,
    late_error,
    multiple_error,
    sum_error,
    suspects,
    update_error,
)
from dyncp.gradients.sharded import Sharded, sharded_parameters
from dyncp.gradients.sums import local_part

logger = logging.getLogger(__name__)

CHOSEN = 8  # parameters whose contributions are caught
LARGEST = 1 << 18  # elements of such a parameter, if there are smaller ones
ALIKE = 1e-6  # relative: sums over equal weights


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

    @property
    def is_fresh(self) -> bool:
        """Whether its gradient was reset, in one of both ways, on this rank."""
        gradient = self.parameter.grad
        if self.sharded is not None and self.sharded.waits:
            return False
        return gradient is None or not local_part(gradient).any()


class Reduced(NamedTuple):
    """A gradient before it may be clipped."""

    gradient: Tensor
    version: int
    values: Tensor

    @classmethod
    def of(cls, gradient: Tensor) -> "Reduced":
        return cls(gradient, local_part(gradient)._version, gradient.detach().clone())

    def changed_once(self, gradient: Tensor | None) -> bool:
        """Whether it is the same gradient, and was changed at most once."""
        return gradient is self.gradient and local_part(gradient)._version <= self.version + 1


class Watched:
    """What is known of one optimiser. `looks` and `steps` are its numbers so far."""

    def __init__(self, optimizer: Optimizer, groups: list[Any]) -> None:
        self._groups = groups
        self.looks = self.steps = 1
        self.tasks: set[int] = set()  # backward passes that reached its parameters
        self._held = list(_parameters_of(optimizer))
        self._caught: dict[int, Tensor] = {}  # this rank's contributions, by number
        self._reduced: dict[int, Reduced] = {}
        self._chosen = self._choose()
        self.hooks = [self._hook(number) for number in self._chosen]
        self._began = [_sums(held.parameter) for held in self._held]
        self._history: list[Scales] = []
        self._is_summed = False  # by sum_gradients
        self._is_late = False  # backward added to gradients that had been summed

    @property
    def is_idle(self) -> bool:
        """Whether the optimiser has nothing to do."""
        return all(held.parameter.grad is None for held in self._held)

    def _choose(self) -> list[int]:
        """Some parameters, from all parts of the model. None if FSDP has not made those that layers
        use, as before the first forward."""
        sizes = {n: held.leaf.numel() for n, held in enumerate(self._held) if held.leaf is not None}
        small = [n for n, size in sizes.items() if size <= LARGEST] or list(sizes)[:1]
        return small[:: -(-len(small) // CHOSEN) or 1]

    def _hook(self, number: int) -> Any:
        leaf: Any = self._held[number].leaf
        return leaf.register_hook(partial(self._catch, number))

    def _catch(self, number: int, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self.tasks:
            self._begin(task)
        own = gradient.detach().to(torch.float64, copy=True)
        self._caught[number] = self._caught[number] + own if number in self._caught else own

    def _begin(self, task: int) -> None:
        """A backward pass has reached the first of the parameters."""
        if all(self._held[number].is_fresh for number in self._chosen):
            self._forget()  # gradients of a step that was not made
        self._is_late |= self._is_summed
        self.tasks.add(task)
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        """Runs at the end of backward, and once more, after the reductions of wrappers, which wait
        for this end as well."""
        Variable._execution_engine.queue_callback(self._after_reductions)

    def _after_reductions(self) -> None:
        self._remember(set(self._chosen))

    def _remember(self, numbers: set[int]) -> None:
        for number in numbers.intersection(self._chosen):
            gradient = self._held[number].parameter.grad
            if gradient is not None:
                self._reduced[number] = Reduced.of(gradient)

    def _forget(self) -> None:
        self._caught.clear()
        self._reduced.clear()
        self.tasks.clear()
        self._is_summed = self._is_late = False

    def reset(self) -> None:
        """Forgets the contributions of the step that is about to be made."""
        self._forget()
        self.steps += 1

    def release(self) -> None:
        self._forget()
        while self.hooks:
            self.hooks.pop().remove()

    def look(self, batches: set[MicroBatch], factors: list[float], scaled: float) -> None:
        """Raises if gradients or weights are wrong. `batches` and `factors` are those of the
        backward passes since the last step."""
        self.looks += 1
        if not self._is_comparable():
            self.release()
            return
        if self._any_rank(self._is_late):
            raise late_error()
        self._compare("weights", [_sums(held.parameter) for held in self._held])
        self._compare("gradients", [_sums(_gradient(held)) for held in self._held])
        least, most = self._span(factors)
        scales = self._measure_scales(most if least == most else None, scaled)
        error = update_error(batches, scales)
        if self._any_rank(error is not None):
            raise error or ValueError("another rank stepped before its optimiser step is complete")
        if self._any_rank(len(set(factors)) > 1):
            return  # losses with weights of their own
        if least is not None and most is not None and least != most:
            raise factors_error(least, most)
        self._judge(scales, batches)

    def summed(self, parameters: set[int]) -> None:
        """Raises if the gradients of these parameters, by id, are not the sums."""
        own = {n for n, held in enumerate(self._held) if id(held.parameter) in parameters}
        if own and self._is_comparable():
            found = self._measure({n: self._held[n].parameter.grad for n in own})
            if not found.is_sum:
                raise sum_error(found.ratio)
            self._remember(own)
            self._is_summed = True

    def _any_rank(self, given: bool) -> bool:
        found = torch.tensor([float(given)], device=self._device)
        return bool(_reduce(found, self._groups).item())

    def _span(self, factors: list[float]) -> tuple[float | None, float | None]:
        """The least and the most of all ranks' factors; None if a rank knows none."""
        known = [min(factors), -max(factors)] if factors else [-math.inf, math.inf]
        found = torch.tensor(known, device=self._device, dtype=torch.float64)
        least, most = _reduce(found, self._groups, dist.ReduceOp.MIN).tolist()
        return (None, None) if math.isinf(least) else (least, -most)

    def _measure_scales(self, factor: float | None, scaled: float) -> Scales:
        gradients = {n: self._held[n].parameter.grad for n in self._chosen}
        reduced = {n: found.values for n, found in self._reduced.items()}
        is_direct = all(
            found.changed_once(self._held[n].parameter.grad) for n, found in self._reduced.items()
        )
        return Scales(
            self._measure(reduced),
            self._measure(gradients),
            factor,
            scaled,
            not self._any_rank(not is_direct),
        )

    def _judge(self, scales: Scales, batches: set[MicroBatch]) -> None:
        sizes = [float(dist.get_world_size(one)) for one in self._groups]
        divisors = [held.sharded.divisor for held in self._held if held.sharded is not None]
        updates = len({(batch.loader, batch.update) for batch in batches})
        self._history.append(scales)
        wrong = suspects([*sizes, math.prod(sizes), *divisors], len(batches), updates)
        error = multiple_error(self._history, wrong)
        if error is not None:
            raise error

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

    def _measure(self, gradients: Mapping[int, Tensor | None]) -> Measured:
        """How many times the sum over ranks of what backward computed these gradients are."""
        has = [n in self._caught and gradients.get(n) is not None for n in range(len(self._held))]
        mask = torch.tensor(has, dtype=torch.float64, device=self._device)
        common = _reduce(mask, self._groups, dist.ReduceOp.MIN).nonzero().flatten().tolist()
        if not common:
            return Measured()
        total = torch.cat([_whole(self._caught[number]).flatten() for number in common])
        for one in self._groups:
            dist.all_reduce(total, group=one)
        given: list[Any] = [gradients[number] for number in common]
        found = torch.cat([_whole(gradient.detach().double()).flatten() for gradient in given])
        size = float(total @ total)
        if not size:
            return Measured()  # a step without targets
        ratio = float(found @ total) / size
        distance = float((found - ratio * total).norm()) / size**0.5
        return Measured(ratio, distance / max(abs(ratio), 1e-30))


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
