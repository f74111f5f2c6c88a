"""Random numbers of data reading: the loader's own, so that one seed gives one run.

Datasets, samplers and mask functions run in background threads, where torch's global generator is
that of the training loop: what either draws would depend on the other's pace. A function mode is
local to its thread; in it, torch's random functions that get no generator take one that is seeded
by the loader's seed, the epoch and the sample. So every rank draws the same for a sample, whichever
samples it reads.

Generators that a sampler has itself are saved at the start of an epoch and set there again.
"""

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

FUNCTIONS = (
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm",
)  # fmt: skip
METHODS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "multinomial", "normal_", "random_", "uniform_",
)  # fmt: skip
RANDOM = {getattr(torch.Tensor, name) for name in METHODS} | {
    getattr(torch, name)
    for name in FUNCTIONS
    if not name.endswith("_like") or "generator" in getattr(torch.ops.aten, name).overloads()
}

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
DEPTH = 3  # of samplers in samplers: a BatchSampler has a RandomSampler, which has a generator


class Drawing(TorchFunctionMode):
    """Inside it, this thread draws from a generator of its own; `what` seeds it."""

    def __init__(self, *what: object) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed_of(*what))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM and kwargs.get("generator") is None and _on_cpu(args, kwargs):
            kwargs = kwargs | {"generator": self._generator}
        return func(*args, **kwargs)


def seed_of(*what: object) -> int:
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _on_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    devices = [value.device for value in args if isinstance(value, torch.Tensor)]
    return all(torch.device(d).type == "cpu" for d in [*devices, kwargs.get("device") or "cpu"])


def generator_states(sampler: Any) -> list[Any]:
    """States of all generators that a sampler has, also in the sampler that it wraps."""
    return [_state_of(generator) for generator in _generators(sampler)]


def set_generator_states(sampler: Any, states: list[Any]) -> None:
    generators = _generators(sampler)
    if len(generators) != len(states):
        raise ValueError(
            f"loader state has {len(states)} states of the sampler's generators; this "
            f"{type(sampler).__name__} has {len(generators)} generators"
        )
    for generator, state in zip(generators, states, strict=True):
        _set_state(generator, state)


def _generators(sampler: Any, depth: int = DEPTH) -> list[Any]:
    found: list[Any] = []
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, GENERATORS):
            found.append(value)
        elif depth and isinstance(value, torch.utils.data.Sampler):
            found += _generators(value, depth - 1)
    return found


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
