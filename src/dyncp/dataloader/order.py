"""The order that a sampler gives, the same once more from any place in the epoch.

A sampler is iterated from the start of the epoch, with its generators as they were there. What it
gives before the place is compared with what it gave before the state was saved: a sampler that
cannot repeat itself is refused, instead of leaving out samples and giving others twice.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from dyncp.dataloader.generators import Drawing, generator_states, set_generator_states
from dyncp.dataloader.state import Position

END = object()


class SampledOrder:
    """What a sampler (indices) or batch sampler (lists of indices) gives, epoch by epoch."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._begun = False
        self._lock = threading.RLock()  # `aside` is called in the training thread

    def start(self) -> dict[str, Any]:
        """What is needed to begin the next epoch once more."""
        return {"generators": generator_states(self._sampler), "taken": Taken().text()}

    def rewind(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state at the start of the epoch of a state."""
        return {**state, "taken": Taken().text()}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside it the sampler may be iterated without a trace."""
        with self._lock:
            states, begun = generator_states(self._sampler), self._begun
            yield
            set_generator_states(self._sampler, states)
            self._begun = begun

    def items(self, position: Position) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The items from a position on, each with the state after it."""
        start, drawing = position.dataset_state, Drawing(self._seed, position.epoch, "order")
        with self._lock, drawing:
            set_generator_states(self._sampler, start["generators"])
            set_epoch(self._sampler, position.epoch)
            items = iter(self._sampler)
            self._check_once(items)
            taken = Taken()
            for item in islice(items, position.samples):
                taken.add(_indices(item))
        taken.check(position.samples, start["taken"], f"sampler {type(self._sampler).__name__}")
        while True:
            with self._lock, drawing:
                item = next(items, END)
            if item is END:
                return
            taken.add(_indices(item))
            yield item, start | {"taken": taken.text()}

    def _check_once(self, items: Iterator[Any]) -> None:
        if self._begun and items is self._sampler:
            raise ValueError(
                f"the sampler is a {type(self._sampler).__name__}, which can be iterated once; "
                "give a list or a Sampler for further epochs or resuming"
            )
        self._begun = True


class Taken:
    """Stands for everything that has been taken in an epoch, in order."""

    def __init__(self) -> None:
        self._digest, self._count = hashlib.blake2b(digest_size=8), 0

    def add(self, data: bytes) -> None:
        self._digest.update(data)
        self._count += 1

    def text(self) -> str:
        return self._digest.hexdigest()

    def check(self, count: int, text: str, what: str) -> None:
        if self._count < count:
            raise ValueError(
                f"loader state was saved after {count} items of the {what}, which now ends after "
                f"{self._count}; the samples after them cannot be found"
            )
        if count and text != self.text():
            raise ValueError(
                f"the {what} does not give the same {count} items as before the loader state was "
                "saved: some samples would be left out and others trained on twice; it needs a "
                "fixed seed, a generator of its own (as an attribute), or set_epoch"
            )


def describe_sampler(sampler: Any) -> str:
    """What can be told of a sampler without iterating it; equal for equal samplers."""
    if sampler is None:
        return ""
    name = type(sampler).__name__
    if isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor):
        return f"{name} of {len(sampler)} ({digest_of(_content(sampler))})"
    told = [f"len={len(sampler)}"] if isinstance(sampler, Sized) else []
    if isinstance(sampler, Sampler) and type(sampler).__module__.startswith("torch.utils.data"):
        told += [_attribute(key, value) for key, value in vars(sampler).items() if key != "epoch"]
    return f"{name}({', '.join(text for text in told if text)})"


def _content(items: Any) -> bytes:
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


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def set_epoch(what: Any, epoch: int) -> None:
    """Samplers and datasets that shuffle themselves do it by epoch."""
    if hasattr(what, "set_epoch"):
        what.set_epoch(epoch)


def _indices(item: Any) -> bytes:
    return np.asarray(item if np.ndim(item) == 0 else list(item), np.int64).tobytes()
