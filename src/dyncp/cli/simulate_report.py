"""What `dyncp simulate` prints: a line per method, wins, and a verdict in words."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dyncp.planner import AUTO

OURS = "dyncp"

# Steps that differ by less count as equally fast: as much depends on where blocks happen to end.
TIE = 0.005
# Below this difference of the mean step a simulation decides nothing.
MARGIN = 0.02
PARTS = {
    "kernel_seconds": "attention kernels",
    "token_seconds": "per-token work",
    "exposed_seconds": "exposed communication and waiting",
}
MOST_SPLITS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """One batch under one method. A step is `kernel_seconds` + `exposed_seconds` (all attention
    layers) + `token_seconds`, each of the rank that has most."""

    solver: str
    static: bool
    kernel_seconds: float
    exposed_seconds: float
    token_seconds: float
    ideal_seconds: float
    forward_bytes: int
    inter_machine_bytes: int
    compute_max_over_mean: float
    tokens_max_over_mean: float
    workspace_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        return self.kernel_seconds + self.exposed_seconds + self.token_seconds


Batches = Sequence[Mapping[str, Outcome]]


def summarise(batches: Batches) -> dict[str, Any]:
    """Numbers of every method (ours first, then the fastest first), wins and the best static."""
    ideal = [min(o.ideal_seconds for o in outcomes.values()) for outcomes in batches]
    methods = {
        name: _method([outcomes[name] for outcomes in batches], ideal) for name in batches[0]
    }
    order = sorted(methods, key=lambda name: (name != OURS, methods[name]["step_seconds"]["mean"]))
    return {
        "num_batches": len(batches),
        "ideal_seconds": _mean(ideal),
        "methods": {name: methods[name] for name in order},
        "best_static": next(name for name in order if name != OURS),
        "wins": _wins(batches),
    }


def _method(outcomes: Sequence[Outcome], ideal: Sequence[float]) -> dict[str, Any]:
    def both(field: str) -> dict[str, float]:
        values = [float(getattr(outcome, field)) for outcome in outcomes]
        return {"mean": _mean(values), "worst": max(values)}

    ratios = [o.step_seconds / least for o, least in zip(outcomes, ideal, strict=True)]
    return {
        "step_seconds": both("step_seconds"),
        "ratio_to_ideal": _mean(ratios),
        "forward_bytes": both("forward_bytes")["mean"],
        "inter_machine_bytes": both("inter_machine_bytes")["mean"],
        "compute_max_over_mean": both("compute_max_over_mean"),
        "tokens_max_over_mean": both("tokens_max_over_mean"),
        "peak_workspace_bytes": max(outcome.workspace_bytes for outcome in outcomes),
        "parts": {part: both(part)["mean"] for part in PARTS},
        "static_batches": sum(outcome.static for outcome in outcomes),
        "solvers": dict(Counter(outcome.solver for outcome in outcomes).most_common()),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _wins(batches: Batches) -> dict[str, Any]:
    """In how many batches ours is faster than, as fast as and slower than the best static method
    of that batch, and by how much at worst."""
    ratios = []
    for outcomes in batches:
        best = min(o.step_seconds for name, o in outcomes.items() if name != OURS)
        ratios.append(outcomes[OURS].step_seconds / best)
    faster, slower = sum(r < 1 - TIE for r in ratios), sum(r > 1 + TIE for r in ratios)
    equal = len(ratios) - faster - slower
    return {"faster": faster, "equal": equal, "slower": slower, "worst_ratio": max(ratios)}


def verdict(summary: Mapping[str, Any], solver: str) -> str:
    """Use it or not, and why, in words."""
    best, methods = summary["best_static"], summary["methods"]
    ours, static = methods[OURS], methods[best]
    mine, theirs = ours["step_seconds"]["mean"], static["step_seconds"]["mean"]
    given = f"on {_batches(summary['num_batches'])} a step takes {_ms(mine)}"
    if theirs > mine * (1 + MARGIN):
        return (
            f"Use dyncp: {given}, {theirs / mine:.2f}× faster than the best static method "
            f"({best}, {_ms(theirs)}), {_against_each(summary)}. {_gain(ours, static)} "
            f"{_composition(ours)}{_hint(summary, solver)}"
        )
    if theirs * (1 + MARGIN) >= mine:
        reason = f"is within {100 * MARGIN:.0f} %. {_limit(ours)}"
    else:
        reason = f"is {mine / theirs:.2f}× faster. {_gain(static, ours)}"
    return (
        f"Not worth it: {given}, and the best static method ({best}, {_ms(theirs)}) {reason}"
        f"{_hint(summary, solver)}"
    )


def _hint(summary: Mapping[str, Any], solver: str) -> str:
    """What the planner's search would do, or did."""
    taken, count = summary["methods"][OURS]["static_batches"], summary["num_batches"]
    if solver == AUTO and taken:
        return f" The planner itself took a static method in {taken} of {count} batches."
    if solver != AUTO and summary["wins"]["slower"]:
        return " --solver auto takes the best of both in every batch."
    return ""


def _batches(count: int) -> str:
    return f"these {count} batches" if count > 1 else "this batch"


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{0 if milliseconds >= 1000 else 1 if milliseconds >= 10 else 2}f} ms"


def _against_each(summary: Mapping[str, Any]) -> str:
    wins, count = summary["wins"], summary["num_batches"]
    if not wins["slower"]:
        return "and it was never slower than any of them"
    return (
        f"although in {wins['slower']} of {count} batches one of them is faster (at most "
        f"{wins['worst_ratio']:.2f}×)"
    )


def _gain(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> str:
    """Where most of the difference comes from."""
    saved = {part: slow["parts"][part] - fast["parts"][part] for part in PARTS}
    part = max(saved, key=lambda name: saved[name])
    return (
        f"Most of the difference is {PARTS[part]}: {_ms(fast['parts'][part])} instead of "
        f"{_ms(slow['parts'][part])}."
    )


def _composition(ours: Mapping[str, Any]) -> str:
    """How the step divides, largest part first, and how far it is from the ideal."""
    total = ours["step_seconds"]["mean"]
    parts = sorted(PARTS, key=lambda part: -ours["parts"][part])
    shares = [
        f"{100 * ours['parts'][p] / total:.0f} % {PARTS[p]}" for p in parts if ours["parts"][p]
    ]
    return f"What is left is {', '.join(shares)}; {_above(ours)}."


def _limit(ours: Mapping[str, Any]) -> str:
    part = max(PARTS, key=lambda name: ours["parts"][name])
    share = 100 * ours["parts"][part] / ours["step_seconds"]["mean"]
    return f"The limit is {PARTS[part]}, {share:.0f} % of the step; {_above(ours)}."


def _above(ours: Mapping[str, Any]) -> str:
    return f"the step is {100 * (ours['ratio_to_ideal'] - 1):.1f} % above the ideal"


def draw_table(summary: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{'':<24}{'step ms':^18}{'× ideal':>9}{'forward MB':^18}{'compute':^14}{'tokens':^14}"
        f"{'workspace':>11}"
    )
    yield (
        f"{'':<24}{'mean':>9}{'worst':>9}{'mean':>9}{'mean':>9}{'(inter)':>9}"
        f"{'mean':>8}{'worst':>6}{'mean':>8}{'worst':>6}{'MB':>11}  split (batches)"
    )
    for name, numbers in summary["methods"].items():
        yield _row(name, numbers)
    wins, count = summary["wins"], summary["num_batches"]
    yield ""
    yield (
        f"dyncp against the best static method of each batch: faster in {wins['faster']}, as fast "
        f"in {wins['equal']}, slower in {wins['slower']} of {count}"
    )


def _row(name: str, numbers: Mapping[str, Any]) -> str:
    step, compute = numbers["step_seconds"], numbers["compute_max_over_mean"]
    tokens = numbers["tokens_max_over_mean"]
    return (
        f"{name:<24}{1e3 * step['mean']:>9.2f}{1e3 * step['worst']:>9.2f}"
        f"{numbers['ratio_to_ideal']:>9.3f}{numbers['forward_bytes'] / 1e6:>9.1f}"
        f"{numbers['inter_machine_bytes'] / 1e6:>9.1f}"
        f"{compute['mean']:>8.2f}{compute['worst']:>6.2f}{tokens['mean']:>8.2f}"
        f"{tokens['worst']:>6.2f}{numbers['peak_workspace_bytes'] / 1e6:>11.1f}  "
        f"{_splits(name, numbers['solvers'])}"
    )


def _splits(name: str, solvers: Mapping[str, int]) -> str:
    """Degrees of static methods, and for ours the solvers themselves, the most frequent first."""
    named = [
        f"{solver if name == OURS else solver.partition('/')[2] or 'fair share'} ({count})"
        for solver, count in solvers.items()
    ]
    more = len(named) - MOST_SPLITS
    return ", ".join(named[:MOST_SPLITS]) + (f" and {more} more" if more > 0 else "")
