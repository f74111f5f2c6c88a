"""Position: how far an iteration has come, and its form in `state_dict`.

A state has the same keys at any time, and plain values: torch.distributed.checkpoint loads a saved
state into that of a new loader, key by key.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dyncp.dataloader.state_text import from_text, to_text

VERSION = 2


@dataclass(frozen=True)
class Position:
    """Where the next batch starts. Counts are over all replicas, so that they mean the same on
    another number of ranks: `batches` of this epoch, and batches of `total` epochs (which a budget
    schedule sees). Inside an optimiser step `items` is its number of targets.

    The first `samples` samples of the epoch's order are in those batches; of the samples after
    them `taken` are too (place, first token). The batches that the rest fills are numbered from 0:
    `dealt` of them were dealt already. `dataset_state` is what the source needs to go on after the
    first `samples` (None: an epoch that nothing is known of yet)."""

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
class Terms:
    """What has to be equal for a state to mean the same batches. `order`, `schedule` and `dataset`
    stand for the sampler, the budget schedule and the samples."""

    seed: int
    shuffle: bool
    order: str
    dataset: str
    num_samples: int | None
    tokens_per_batch: int | None  # None: a schedule, or batches of a sampler
    schedule: str
    accumulation_steps: int
    max_length: int | None
    too_long: str
    drop_last: bool
    window: int  # that batches are filled from
    bad_samples: str
    empty_samples: str
    lengths: str = ""  # "": not given


def to_state(position: Position, terms: Terms, num_replicas: int) -> dict[str, Any]:
    values = {field.name: getattr(position, field.name) for field in fields(Position)}
    return {
        "version": VERSION,
        "position": {name: _leaf(value) for name, value in values.items()},
        "terms": asdict(terms),
        "num_replicas": num_replicas,
    }


def from_state(
    state: Mapping[str, Any], terms: Terms, num_replicas: int, *, own_budget: bool
) -> tuple[Position, Terms]:
    """The position and terms of a state; raises ValueError where it is of other batches.

    Unless the budget was given (`own_budget`), that of the state is taken over: the default depends
    on the number of ranks.
    """
    _check_keys(state)
    saved = Terms(**state["terms"])
    if not own_budget:
        terms = replace(terms, tokens_per_batch=saved.tokens_per_batch)
    for name, value in asdict(saved).items():
        mine = getattr(terms, name)
        if name == "lengths" and not (mine and value):
            continue  # batches are the same, whoever knew their lengths
        if mine != value:
            raise ValueError(
                f"loader state was saved with {name}={value}, this loader has {mine}; the batches "
                "after it would not be the next ones"
            )
    position = _position(state["position"])
    if state["num_replicas"] != num_replicas:
        position = _on_other_replicas(position, terms, state["num_replicas"], num_replicas)
    return position, terms


def _leaf(value: Any) -> int | str | None:
    return value if value is None or isinstance(value, int) else to_text(value)


def _position(saved: Mapping[str, Any]) -> Position:
    values = {k: from_text(v) if isinstance(v, str) else v for k, v in saved.items()}
    taken = tuple((int(place), int(start)) for place, start in values["taken"])
    return Position(**values | {"taken": taken, "dealt": tuple(map(int, values["dealt"]))})


def _check_keys(state: Mapping[str, Any]) -> None:
    if state.get("version") != VERSION:
        raise ValueError(
            f"loader state has version {state.get('version')!r}; this dyncp reads {VERSION}"
        )
    for name, kind in (("position", Position), ("terms", Terms)):
        known, found = {field.name for field in fields(kind)}, set(state.get(name) or ())
        if found != known:
            raise ValueError(
                f"loader state has {name} with {sorted(found)}; this dyncp reads {sorted(known)}"
            )


def _on_other_replicas(position: Position, terms: Terms, before: int, now: int) -> Position:
    """Steps of another number of batches can only begin where steps of the old number ended."""
    old, new = before * terms.accumulation_steps, now * terms.accumulation_steps
    if position.batches % old or position.batches % new:
        raise ValueError(
            f"loader state was saved after {position.batches} batches on {before} replicas, which "
            f"is inside an optimiser step of {now} replicas; save at the end of an optimiser step"
        )
    return replace(position, items=None)
