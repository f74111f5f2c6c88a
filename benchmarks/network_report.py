"""What measured plans say about predicted ones: errors, pairs, and whether `auto` is fastest."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

# Pairs of plans that differ by less than this share, measured, can change places by chance.
APART = 0.03
# `auto` may take so many times longer than the fastest plan measured.
AS_FAST = 1.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan of a batch: predicted and measured seconds."""

    batch: str
    name: str
    static: bool
    auto: bool
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """0.05: it took 5 % longer than predicted."""
        return self.measured / self.predicted - 1


@dataclass(frozen=True, slots=True)
class Pairs:
    """Of pairs of plans of one batch: how many, and in how many the predicted winner won."""

    count: int
    right: int

    def __str__(self) -> str:
        share = f" ({self.right / self.count:.1%})" if self.count else ""
        return f"{self.right} of {self.count}{share}"


def count_pairs(outcomes: Sequence[Outcome], apart: float = 0.0) -> Pairs:
    """Pairs whose slower plan took more than 1 + `apart` times as long as the faster one."""
    results = [
        (one.predicted < other.predicted) == (one.measured < other.measured)
        for own in by_batch(outcomes)
        for one, other in combinations(own, 2)
        if max(one.measured, other.measured) > (1 + apart) * min(one.measured, other.measured)
    ]
    return Pairs(len(results), sum(results))


def by_batch(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    names = dict.fromkeys(outcome.batch for outcome in outcomes)
    return [[outcome for outcome in outcomes if outcome.batch == name] for name in names]


def summarize(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of text."""
    kinds = {
        "all": outcomes,
        "dynamic": [one for one in outcomes if not one.static],
        "static": [one for one in outcomes if one.static],
    }
    for name, own in kinds.items():
        if own:
            yield f"{name:8} {_errors(own)}"
    if kinds["dynamic"] and kinds["static"]:
        apart = _bias(kinds["dynamic"]) - _bias(kinds["static"])
        yield f"dynamic plans took {apart:+.1%} longer than static ones, by what was predicted"
    yield f"predicted winner won in {count_pairs(outcomes)} pairs"
    yield f"                     in {count_pairs(outcomes, APART)} that differ by more than 3 %"
    for own in by_batch(outcomes):
        yield _standing(own)


def _bias(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(one.error for one in outcomes)


def _errors(outcomes: Sequence[Outcome]) -> str:
    size = [abs(one.error) for one in outcomes]
    worst = max(outcomes, key=lambda one: abs(one.error))
    return (
        f"{len(outcomes):4} plans: measured {_bias(outcomes):+.1%} in the median, error "
        f"{statistics.median(size):.1%} in the median, {max(size):.1%} at worst "
        f"({worst.name}, {worst.batch})"
    )


def _standing(outcomes: Sequence[Outcome]) -> str:
    """How `auto` did in a batch."""
    auto = next(one for one in outcomes if one.auto)
    static = min((one for one in outcomes if one.static), key=lambda one: one.measured)
    fastest = min(outcomes, key=lambda one: one.measured)
    ratio = auto.measured / fastest.measured
    place = "fastest" if fastest is auto else f"{ratio:.3f} × the fastest ({fastest.name})"
    verdict = "" if ratio <= AS_FAST else ", TOO SLOW"
    gain, predicted = (
        getattr(static, what) / getattr(auto, what) for what in ("measured", "predicted")
    )
    return (
        f"{auto.batch}: {auto.name} is {place}{verdict}; best static {static.name}: "
        f"{gain:.2f} × its time measured, {predicted:.2f} predicted"
    )
