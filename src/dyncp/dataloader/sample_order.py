"""The order that a sampler gives, repeated exactly from any place in an epoch, or refused.

A sampler is iterated from the start of the epoch, with its generators as they were there. What it
yields up to the place is compared, by digest, with what it yielded before the state was saved: a
sampler that cannot repeat itself is refused, instead of skipping samples and repeating others.
"""

import hashlib
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from dyncp.dataloader.options import digest_of
from dyncp.dataloader.reading import SeededRandom
from dyncp.dataloader.state import Position

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MAX_NESTING = 3  # a BatchSampler has a RandomSampler, which has a generator
END = object()


class SamplerOrder:
    """What a sampler (indices) or batch sampler (lists of indices) yields, epoch by epoch."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._begun = False
        self._lock = threading.RLock()  # `undisturbed` is entered in the training thread

    def start(self) -> dict[str, Any]:
        """The state at the start of the next epoch."""
        return {"generators": _generator_states(self._sampler), "taken": OrderDigest().text()}

    def rewind(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state at the start of the epoch of a state."""
        return {**state, "taken": OrderDigest().text()}

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside this context, iterating the sampler leaves no trace in it."""
        with self._lock:
            states, begun = _generator_states(self._sampler), self._begun
            yield
            _set_generator_states(self._sampler, states)
            self._begun = begun

    def items(self, position: Position) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The items from a position on, each with the state after it."""
        start, randomness = (
            position.dataset_state,
            SeededRandom(self._seed, position.epoch, "order"),
        )
        with self._lock, randomness:
            _set_generator_states(self._sampler, start["generators"])
            set_epoch(self._sampler, position.epoch)
            items = iter(self._sampler)
            self._check_once(items)
            taken = OrderDigest()
            for item in islice(items, position.samples):
                taken.add(_index_bytes(item))
        taken.check(position.samples, start["taken"], f"sampler {type(self._sampler).__name__}")
        while True:
            with self._lock, randomness:
                item = next(items, END)
            if item is END:
                return
            taken.add(_index_bytes(item))
            yield item, start | {"taken": taken.text()}

    def _check_once(self, items: Iterator[Any]) -> None:
        if self._begun and items is self._sampler:
            raise ValueError(
                f"the sampler is a {type(self._sampler).__name__}, which can be iterated only "
                "once; pass a list or a Sampler for further epochs or resuming"
            )
        self._begun = True


class OrderDigest:
    """A digest of all items taken in an epoch, in order."""

    def __init__(self) -> None:
        self._digest, self._count = hashlib.blake2b(digest_size=8), 0

    def add(self, data: bytes) -> None:
        self._digest.update(data)
        self._count += 1

    def text(self) -> str:
        return self._digest.hexdigest()

    def check(self, count: int, text: str, what: str) -> None:
        """Raises ValueError unless the same `count` items were added as before."""
        if self._count < count:
            raise ValueError(
                f"the loader state was saved after {count} items of the {what}, which now ends "
                f"after {self._count}; the samples after them cannot be found"
            )
        if count and text != self.text():
            raise ValueError(
                f"the {what} does not give the same {count} items as before the loader state was "
                "saved: some samples would be skipped and others trained on twice; it needs a "
                "fixed seed, a generator of its own (as an attribute), or set_epoch"
            )


def set_epoch(shuffled: Any, epoch: int) -> None:
    """For samplers and datasets that shuffle themselves by epoch."""
    if hasattr(shuffled, "set_epoch"):
        shuffled.set_epoch(epoch)


def _index_bytes(item: Any) -> bytes:
    return np.asarray(item if np.ndim(item) == 0 else list(item), np.int64).tobytes()


# Describing a sampler


def describe_sampler(sampler: Any) -> str:
    """What is known of a sampler without iterating it; equal for equal samplers."""
    if sampler is None:
        return ""
    name = type(sampler).__name__
    if isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor):
        return f"{name} of {len(sampler)} ({digest_of(_list_bytes(sampler))})"
    known = [f"len={len(sampler)}"] if isinstance(sampler, Sized) else []
    if isinstance(sampler, Sampler) and type(sampler).__module__.startswith("torch.utils.data"):
        known += [_attribute(key, value) for key, value in vars(sampler).items() if key != "epoch"]
    return f"{name}({', '.join(text for text in known if text)})"


def _list_bytes(items: Any) -> bytes:
    try:
        array = np.asarray(items, np.int64)
        return repr(array.shape).encode() + array.tobytes()
    except (TypeError, ValueError):  # lists of different lengths
        return repr([np.asarray(item, np.int64).tolist() for item in items]).encode()


def _attribute(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return f"{key}={value}"
    if isinstance(value, torch.Tensor):
        return f"{key}={digest_of(value.contiguous().numpy().tobytes())}"
    return f"{key}={describe_sampler(value)}" if isinstance(value, Sampler) else ""


# A sampler's own generators


def _generator_states(sampler: Any) -> list[Any]:
    """The states of all generators that a sampler has, including those of a sampler it wraps."""
    return [_state_of(generator) for generator in _generators(sampler)]


def _set_generator_states(sampler: Any, states: list[Any]) -> None:
    generators = _generators(sampler)
    if len(generators) != len(states):
        raise ValueError(
            f"the loader state has {len(states)} states of the sampler's generators; this "
            f"{type(sampler).__name__} has {len(generators)} generators"
        )
    for generator, state in zip(generators, states, strict=True):
        _set_state(generator, state)


def _generators(sampler: Any, depth: int = MAX_NESTING) -> list[Any]:
    found: list[Any] = []
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, GENERATORS):
            found.append(value)
        elif depth and isinstance(value, Sampler):
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
