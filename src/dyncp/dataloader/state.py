"""Resuming: the position of a loader, how it is saved, and how the order of a sampler is repeated.

    {"version": 2, "num_replicas": 1,
     "position": {"epoch": 0, "samples": 40, ...},    see Position
     "terms": {"seed": 0, "shuffle": True, ...}}      settings that the batches depend on

A state always has the same keys, and plain values: torch.distributed.checkpoint loads a saved state
into the state of a new loader, key by key. A dataset's own state may have any structure, and a new
loader has none yet, so it is saved as one string (`to_text`).

The order of a sampler must repeat exactly. The sampler is iterated again from the start of the
epoch, with its generators restored to their states there. A digest of the indices up to the
position is compared with the digest of those before the state was saved. A sampler that does not
repeat its order would skip some samples and repeat others, so it is refused.
"""

import base64
import hashlib
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

from dyncp.dataloader.options import digest_of
from dyncp.dataloader.reading import SeededRandom

VERSION = 2
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MAX_NESTING = 3  # of samplers within samplers: a BatchSampler wraps a RandomSampler, for example
END = object()
Item = TypeVar("Item")


@dataclass(frozen=True)
class Position:
    """Where the next batch starts. `batches` counts the batches of this epoch, `total` those of all
    epochs, which a budget schedule gets. Both count all replicas, so they mean the same on another
    number of ranks. Within an optimiser step, `items` is its number of targets.

    The first `samples` samples of the epoch's order have been filled into batches, and so have the
    later pieces in `taken` (sample number, first token). Of the batches that follow, numbered from
    0, those in `dealt` have been dealt already. `dataset_state` is the state from which the source
    continues after the first `samples` samples (None: the epoch has not started)."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0
    total: int = 0
    items: int | None = None
    dataset_state: Any = None
    taken: tuple[tuple[int, int], ...] = ()
    dealt: tuple[int, ...] = ()

    @property
    def started(self) -> bool:
        return self.batches > 0

    def summary(self) -> dict[str, Any]:
        """What must be equal on all ranks, shortened."""
        rest = self.samples, self.total, self.items, self.taken, self.dealt
        return {"epoch": self.epoch, "batches": self.batches, "rest": digest_of(rest)}

    def next_epoch(self, epoch: int) -> "Position":
        """The start of another epoch."""
        return Position(epoch, total=self.total)


def to_state(position: Position, settings: Mapping[str, Any], num_replicas: int) -> dict[str, Any]:
    return {
        "version": VERSION,
        "position": {
            name: value if value is None or isinstance(value, int) else to_text(value)
            for name, value in vars(position).items()
        },
        "terms": dict(settings),
        "num_replicas": num_replicas,
    }


def from_state(
    state: Mapping[str, Any], settings: Mapping[str, Any], num_replicas: int
) -> Position:
    """The position in a state. Raises ValueError if the state belongs to different batches."""
    if state.get("version") != VERSION:
        raise ValueError(
            f"the loader state has version {state.get('version')!r}; this dyncp reads {VERSION}"
        )
    saved = state["terms"]
    for name in dict.fromkeys([*saved, *settings]):
        value, mine = saved.get(name), settings.get(name)
        if name == "lengths" and not (mine and value):
            continue  # batches do not depend on whether lengths were given
        if mine != value:
            raise ValueError(
                f"the loader state was saved with {name}={value}, this loader has {mine}; it would "
                "not continue with the next batches"
            )
    position = _position(state["position"])
    if state["num_replicas"] != num_replicas:
        steps = settings["accumulation_steps"]
        position = _on_other_replicas(position, steps, state["num_replicas"], num_replicas)
    return position


def _position(saved: Mapping[str, Any]) -> Position:
    known = {field.name for field in fields(Position)}
    if set(saved) != known:
        raise ValueError(
            f"the loader state has a position with {sorted(saved)}; this dyncp reads "
            f"{sorted(known)}"
        )
    return Position(**{k: from_text(v) if isinstance(v, str) else v for k, v in saved.items()})


def _on_other_replicas(position: Position, steps: int, before: int, now: int) -> Position:
    """The position for `now` instead of `before` replicas, which must be at the end of an optimiser
    step (`steps` batches per replica) for both numbers."""
    if position.batches % (before * steps) or position.batches % (now * steps):
        raise ValueError(
            f"the loader state was saved after {position.batches} batches on {before} replicas, "
            f"which is within an optimiser step of {before} or of {now} replicas; to change the "
            "number of replicas, save at the end of an optimiser step for both numbers"
        )
    return replace(position, items=None)


# Texts: JSON preserves numbers, strings, lists and dicts with string keys. Other values are written
# as {"!": kind, "value": ...}. Nothing is pickled.

TAG = "!"


def to_text(value: Any) -> str:
    """The value as JSON. Raises ValueError if its type is not supported."""
    try:
        return json.dumps(_to_json(value, "the state"))
    except RecursionError:
        raise ValueError("the dataset's state cannot be saved: it is nested too deeply") from None


def from_text(text: str) -> Any:
    try:
        return json.loads(text, object_hook=_untag)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"a text in the loader state cannot be read: {error}") from error


def _to_json(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_to_json(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict) and TAG not in value and all(type(k) is str for k in value):
        return {k: _to_json(v, f"{where}[{k!r}]") for k, v in value.items()}
    kind, inner = _tagged(value, where)
    return {TAG: kind, "value": _to_json(inner, where)}


def _tagged(value: Any, where: str) -> tuple[str, Any]:
    """The kind of a value that JSON does not support, and its contents."""
    match value:
        case dict():
            return "dict", [list(pair) for pair in value.items()]
        case tuple():
            return "tuple", list(value)
        case bytes() | bytearray():
            return "bytes", base64.b64encode(value).decode()
        case np.ndarray() if value.dtype.kind in "biuf":
            return "array", [value.dtype.str, list(value.shape), value.tobytes()]
        case torch.Tensor() if value.dtype != torch.bfloat16:
            return "tensor", value.detach().cpu().numpy()
    raise ValueError(
        f"the dataset's state cannot be saved: {where} is {type(value).__name__}; allowed are "
        "numbers, strings, bytes, lists, tuples, dicts, arrays and tensors"
    )


def _untag(value: dict[str, Any]) -> Any:
    return UNTAG[value[TAG]](value["value"]) if TAG in value else value


def _array(parts: list[Any]) -> Any:
    dtype, shape, data = parts
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


UNTAG: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "bytes": base64.b64decode,
    "array": _array,
    "tensor": torch.from_numpy,
}


# The order of a sampler


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

    def items(self, position: Position) -> Iterator[tuple[Any, dict[str, Any]]]:
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
    items: Iterable[Item], position: Position, bytes_of: Callable[[Item], bytes], what: str
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
