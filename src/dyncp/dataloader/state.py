"""Resuming: the position of a loader, how it is saved, and how the order of a sampler is repeated.

    {"version": 3, "num_replicas": 1,
     "position": {"epoch": 0, "samples": 40, ...},    see Position
     "terms": {"seed": 0, "shuffle": True, ...}}      settings that the batches depend on

A state always has the same keys, and plain values: torch.distributed.checkpoint loads a saved state
into the state of a new loader, key by key. A dataset's own state may have any structure, and a new
loader has none yet, so it is saved as one string (`to_text`).
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from dyncp.samples.fields import digest_of
from dyncp.samples.order import SamplePosition

VERSION = 3


@dataclass(frozen=True)
class Position(SamplePosition):
    """Where the next batch starts. `batches` counts the batches of this epoch, `total` those of all
    epochs, which a budget schedule gets. Both count all replicas, so they mean the same on another
    number of ranks. Within an optimiser step, `items` is its number of targets.

    After the first `samples` samples, the later pieces in `taken` (sample number, first token) have
    been filled into batches, too. Of the batches that follow, numbered from 0, those in `dealt`
    have been dealt already."""

    batches: int = 0
    total: int = 0
    items: int | None = None
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
        return replace(Position(epoch), total=self.total)


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
