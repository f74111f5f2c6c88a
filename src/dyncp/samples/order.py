"""The order of the samples of an epoch, repeated exactly from any position on.

The order of a sampler must repeat exactly. The sampler is iterated again from the start of the
epoch, with its generators restored to their states there. A digest of the indices up to the
position is compared with the digest of those before the state was saved. A sampler that does not
repeat its order would skip some samples and repeat others, so it is refused."""

import hashlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

from dyncp.samples.fields import digest_of
from dyncp.samples.reading import SeededRandom

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MAX_NESTING = 3  # of samplers within samplers: a BatchSampler wraps a RandomSampler, for example
END = object()
Item = TypeVar("Item")


@dataclass(frozen=True)
class SamplePosition:
    """The first `samples` samples of an epoch's order have been used. `dataset_state` is the state
    from which the source continues after them (None: the epoch has not started)."""

    epoch: int = 0
    samples: int = 0
    dataset_state: Any = None

    def next_epoch(self, epoch: int) -> Self:
        """The start of another epoch."""
        return type(self)(epoch)


def check_repeatable(name: str, given: Any, iterator: Any, allowed: str) -> None:
    if iterator is given:
        raise ValueError(
            f"the {name} is a {type(given).__name__}, which can be iterated only once; pass "
            f"{allowed} for further epochs or resuming"
        )


class SamplerOrder:
    """The order of an epoch from a sampler (indices) or a batch sampler (lists of indices)."""

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self._begun = False
        self._lock = threading.RLock()  # the training thread uses `undisturbed`

    def start(self) -> dict[str, Any]:
        """The state at the start of the next epoch."""
        return {"generators": _generator_states(self._sampler)}

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside this context, iterating over the sampler does not change its state."""
        with self._lock:
            states, begun = _generator_states(self._sampler), self._begun
            yield
            _set_generator_states(self._sampler, states)
            self._begun = begun

    def items(self, position: SamplePosition) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields the items from a position on, each with the state after it."""
        start = position.dataset_state
        randomness = SeededRandom(self._seed, position.epoch, "order")
        with self._lock, randomness:
            _set_generator_states(self._sampler, start["generators"])
            set_epoch(self._sampler, position.epoch)
            items = iter(self._sampler)
            if self._begun:
                check_repeatable("sampler", self._sampler, items, "a list or a Sampler")
            self._begun = True

        def one_by_one() -> Iterator[Any]:
            while True:
                with self._lock, randomness:
                    item = next(items, END)
                if item is END:
                    return
                yield item

        what = f"sampler {type(self._sampler).__name__}"
        for item, taken in repeat_from(one_by_one(), position, _index_bytes, what):
            yield item, start | {"taken": taken}


def repeat_from(
    items: Iterable[Item], position: SamplePosition, bytes_of: Callable[[Item], bytes], what: str
) -> Iterator[tuple[Item, str]]:
    """Yields the items from a position on, each with a digest of all items up to it. Raises
    ValueError if the items before the position do not have the digest saved in it; `what` names
    their source."""
    count, saved = position.samples, (position.dataset_state or {}).get("taken")
    digest, number = hashlib.blake2b(digest_size=8), 0
    for number, item in enumerate(items, 1):
        digest.update(bytes_of(item))
        if number > count:
            yield item, digest.hexdigest()
        elif number == count and digest.hexdigest() != saved:
            raise ValueError(
                f"the {what} does not give the same {count} items as before the loader state was "
                "saved: some samples would be skipped and others trained on twice; it needs a "
                "fixed seed, a generator of its own (as an attribute), or set_epoch"
            )
    if number < count:
        raise ValueError(
            f"the loader state was saved after {count} items of the {what}, which now ends after "
            f"{number}; the samples after them cannot be found"
        )


def set_epoch(shuffled: Any, epoch: int) -> None:
    """Passes the epoch on to a sampler or dataset that shuffles by epoch."""
    if hasattr(shuffled, "set_epoch"):
        shuffled.set_epoch(epoch)


def _index_bytes(item: Any) -> bytes:
    return np.asarray(item if np.ndim(item) == 0 else list(item), np.int64).tobytes()


# Describing a sampler


def describe_sampler(sampler: Any) -> str:
    """Describes a sampler without iterating over it; equal for equal samplers."""
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
    """The states of all generators of a sampler and of the samplers that it wraps."""
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
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    legacy = {"legacy": False} if isinstance(generator, np.random.RandomState) else {}
    return generator.get_state(**legacy)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)
