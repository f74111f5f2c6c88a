"""Position: how far an iteration has come, and its form in `state_dict`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

VERSION = 2


@dataclass(frozen=True)
class Position:
    """Where the next batch starts. Counts are over all replicas, so that they mean the same on
    another number of ranks: `batches` of this epoch, and batches of `total` epochs (which a budget
    schedule sees). Inside an optimiser step `items` is its number of targets.

    The first `samples` samples of the epoch's order are in those batches; of the samples after
    them `taken` are too (place, first token). The batches that the rest fills are numbered from 0:
    `dealt` of them were dealt already. `dataset_state` is what an iterable dataset says of itself
    after the first `samples`."""

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
        """The start of an epoch after this one."""
        return Position(epoch, total=self.total)


@dataclass(frozen=True)
class Terms:
    """What has to be equal for a state to mean the same batches."""

    seed: int
    shuffle: bool
    num_samples: int | None
    tokens_per_batch: int | None  # None: a schedule, or batches of a sampler
    accumulation_steps: int
    max_length: int | None
    too_long: str
    fill_window: int
    deal_window: int


def to_state(position: Position, terms: Terms, num_replicas: int) -> dict[str, Any]:
    return {
        "version": VERSION,
        "position": asdict(position),
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
    if state.get("version") != VERSION:
        raise ValueError(
            f"loader state has version {state.get('version')!r}; this dyncp reads {VERSION}"
        )
    saved = Terms(**state["terms"])
    if not own_budget:
        terms = replace(terms, tokens_per_batch=saved.tokens_per_batch)
    for name, value in asdict(saved).items():
        if getattr(terms, name) != value:
            raise ValueError(
                f"loader state was saved with {name}={value}, this loader has "
                f"{getattr(terms, name)}; the batches after it would not be the next ones"
            )
    position = _position(state["position"])
    if state["num_replicas"] != num_replicas:
        position = _on_other_replicas(position, terms, state["num_replicas"], num_replicas)
    return position, terms


def _position(values: Mapping[str, Any]) -> Position:
    """JSON and torch.load make lists of tuples."""
    taken = tuple((int(place), int(start)) for place, start in values.get("taken", ()))
    dealt = tuple(map(int, values.get("dealt", ())))
    return Position(**{**values, "taken": taken, "dealt": dealt})


def _on_other_replicas(position: Position, terms: Terms, before: int, now: int) -> Position:
    """Steps of another number of batches can only begin where steps of the old number ended."""
    old, new = before * terms.accumulation_steps, now * terms.accumulation_steps
    if position.batches % old or position.batches % new:
        raise ValueError(
            f"loader state was saved after {position.batches} batches on {before} replicas, which "
            f"is inside an optimiser step of {now} replicas; save at the end of an optimiser step"
        )
    return replace(position, items=None)
