"""What is saved for resuming: where the loader is, and the settings that its batches depend on.

    {"version": 2, "num_replicas": 1,
     "position": {"epoch": 0, "samples": 40, ...},    see Position
     "terms": {"seed": 0, "shuffle": True, ...}}      see BatchSettings

A state has the same keys at any time, and plain values: torch.distributed.checkpoint loads a saved
state into that of a new loader, key by key. A dataset's own state may have any shape, and a loader
that has not begun has none, so it is saved as one text (`to_text`).
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch

VERSION = 2


@dataclass(frozen=True)
class Position:
    """Where the next batch starts. Counts are over all replicas, so that they mean the same on
    another number of ranks: `batches` of this epoch, and `total` batches of all epochs (which a
    budget schedule sees). Inside an optimiser step `items` is its number of targets.

    The first `samples` samples of the epoch's order are in those batches; so are `taken` of the
    samples after them (place, first token). The batches that the rest fills are numbered from 0:
    `dealt` of them have been dealt. `dataset_state` is what the source needs to continue after the
    first `samples` (None: nothing is known of the epoch yet)."""

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

    def next_epoch(self, epoch: int) -> "Position":
        """The start of another epoch."""
        return Position(epoch, total=self.total)


@dataclass(frozen=True)
class BatchSettings:
    """What must be equal for a state to mean the same batches. `order`, `schedule` and `dataset`
    describe the sampler, the budget schedule and the samples."""

    seed: int
    shuffle: bool
    order: str
    dataset: str
    num_samples: int | None
    tokens_per_batch: int | None  # None: a schedule, or a batch sampler
    schedule: str
    accumulation_steps: int
    max_length: int | None
    too_long: str
    drop_last: bool
    window: int  # that batches are filled from
    bad_samples: str
    empty_samples: str
    lengths: str = ""  # "": not given


def to_state(position: Position, settings: BatchSettings, num_replicas: int) -> dict[str, Any]:
    values = {field.name: getattr(position, field.name) for field in fields(Position)}
    return {
        "version": VERSION,
        "position": {name: _leaf(value) for name, value in values.items()},
        "terms": asdict(settings),
        "num_replicas": num_replicas,
    }


def from_state(
    state: Mapping[str, Any], settings: BatchSettings, num_replicas: int, *, own_budget: bool
) -> tuple[Position, BatchSettings]:
    """The position and settings of a state; raises ValueError if it is of other batches.

    Unless the budget was given (`own_budget`), the state's is used: the default depends on the
    number of ranks.
    """
    _check_keys(state)
    saved = BatchSettings(**state["terms"])
    if not own_budget:
        settings = replace(settings, tokens_per_batch=saved.tokens_per_batch)
    for name, value in asdict(saved).items():
        mine = getattr(settings, name)
        if name == "lengths" and not (mine and value):
            continue  # the batches do not depend on who knew the lengths
        if mine != value:
            raise ValueError(
                f"the loader state was saved with {name}={value}, this loader has {mine}; it would "
                "not continue with the next batches"
            )
    position = _position(state["position"])
    if state["num_replicas"] != num_replicas:
        position = _on_other_replicas(position, settings, state["num_replicas"], num_replicas)
    return position, settings


def _leaf(value: Any) -> int | str | None:
    return value if value is None or isinstance(value, int) else to_text(value)


def _position(saved: Mapping[str, Any]) -> Position:
    values = {k: from_text(v) if isinstance(v, str) else v for k, v in saved.items()}
    taken = tuple((int(place), int(start)) for place, start in values["taken"])
    return Position(**values | {"taken": taken, "dealt": tuple(map(int, values["dealt"]))})


def _check_keys(state: Mapping[str, Any]) -> None:
    if state.get("version") != VERSION:
        raise ValueError(
            f"the loader state has version {state.get('version')!r}; this dyncp reads {VERSION}"
        )
    for name, kind in (("position", Position), ("terms", BatchSettings)):
        known, found = {field.name for field in fields(kind)}, set(state.get(name) or ())
        if found != known:
            raise ValueError(
                f"the loader state has {name} with {sorted(found)}; this dyncp reads "
                f"{sorted(known)}"
            )


def _on_other_replicas(
    position: Position, settings: BatchSettings, before: int, now: int
) -> Position:
    """Steps of another number of batches can only begin where a step of the old number ended."""
    old, new = before * settings.accumulation_steps, now * settings.accumulation_steps
    if position.batches % old or position.batches % new:
        raise ValueError(
            f"the loader state was saved after {position.batches} batches on {before} replicas, "
            f"which is inside an optimiser step of {now} replicas; save at the end of an optimiser "
            "step"
        )
    return replace(position, items=None)


# Texts: JSON keeps numbers, strings, lists and dicts with string keys; what it would change is
# written as {"!": kind, "value": ...}. Nothing is pickled.

TAG = "!"
MAX_DEPTH = 100


def to_text(value: Any) -> str:
    """JSON; raises ValueError for a value that cannot be written."""
    return json.dumps(_to_json(value, "the state"))


def from_text(text: str) -> Any:
    try:
        return _from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"a text in the loader state cannot be read: {error}") from error


def _to_json(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_to_json(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict) and TAG not in value and all(type(k) is str for k in value):
        return {k: _to_json(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    kind, inner = _tagged(value, where)
    return {TAG: kind, "value": _to_json(inner, where, depth + 1)}


def _tagged(value: Any, where: str) -> tuple[str, Any]:
    """The kind of a value that JSON does not have, and its contents."""
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


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _from_json(entry) for key, entry in value.items()}
    return UNTAG[value[TAG]](_from_json(value["value"]))


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
