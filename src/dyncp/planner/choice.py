"""Choice: the best candidate and the candidates it was chosen from; which candidates are tried."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dyncp.placement import Limits, Solver, find_solver
from dyncp.planner.task import Candidate, Task
from dyncp.simulate import Simulated

# Shares of the compute tolerance that `owner_computes` is tried with.
TIGHTER = (1.0, 0.5)
# Further tolerances (compute, tokens) if no limits are requested: imbalance can be cheaper than
# bytes.
LOOSE = (0.2, 0.4)
# Placements that moves start from, in addition to the best one: sequences cut less, tiles on any
# rank.
FEW_STARTS = (("owner_computes", Limits(1.0, 2.0)), ("bisection", Limits(*LOOSE)))
MORE_STARTS = (("owner_computes", Limits(0.1, 0.2)), ("owner_computes_fine", Limits(*LOOSE)))
OTHER_STARTS = {"fast": FEW_STARTS, "quality": FEW_STARTS + MORE_STARTS}
# Token tolerances to try with a model: the fullest rank sets the time of all per-token work.
TOKENS = {"fast": (0.01, 0.005), "quality": (0.05, 0.02, 0.01, 0.005, 0.0025)}

# Tried if limits are missed or cost much: smaller blocks, and tiles that may run anywhere.
WAYS_TO_KEEP_LIMITS = ("owner_computes_fine", "bisection_quality")


def dynamic_candidates(task: Task) -> Iterator[tuple[str, Solver, Limits]]:
    """Name, solver and limits of dynamic candidates, the most promising first."""
    config = task.config
    solver = find_solver("owner_computes" if task.model is None else "owner_computes_fine")
    for limits in dict.fromkeys(_tolerances(task)):
        yield f"{solver.name} within {describe_limits(limits)}", solver, limits
    if config.effort == "fast":
        return
    solver, limits = find_solver("bisection_quality"), Limits(*config.limits.tolerances)
    yield solver.name, solver, limits
    if config.head_groups is None:
        for groups in head_group_counts(task)[1:]:
            name = f"{solver.name} with {groups} head groups"
            yield name, replace(solver, head_groups=groups), limits


def _tolerances(task: Task) -> Iterator[Limits]:
    """Tolerances that `owner_computes` is tried with. If none are requested, the loose ones come
    first, since they are best most often."""
    requested, effort = task.config.limits, task.config.effort
    compute, tokens = requested.tolerances.tolist()
    free = requested.compute_tolerance is None
    if task.model is None:
        if free:
            yield Limits(LOOSE[0], LOOSE[1] if requested.token_tolerance is None else tokens)
        yield from (Limits(share * compute, tokens) for share in TIGHTER)
        return
    for most in TOKENS[effort]:
        yield Limits(compute, min(tokens, most))
    if free:
        yield Limits(LOOSE[0], min(tokens, TOKENS[effort][-1]))


def other_starts(task: Task) -> Iterator[tuple[Solver, Limits]]:
    """Solvers and limits whose placements moves start from, in addition to the best one."""
    if task.config.limits.compute_tolerance is not None:
        yield from ((find_solver(name), task.config.limits) for name in WAYS_TO_KEEP_LIMITS)
        return
    for name, limits in OTHER_STARTS[task.config.effort]:
        yield find_solver(name), limits
    # Whole sequences have no block borders, which cost kernel tiles.
    whole = replace(find_solver("uncut"), block_sizes=lambda lengths, _: np.array(lengths))
    yield whole, Limits()


def head_group_counts(task: Task) -> list[int]:
    """Possible numbers of head groups: the divisors of the number of kv heads."""
    if not task.shape.exact:
        return [1]
    return [n for n in range(1, task.shape.kv_heads + 1) if task.shape.kv_heads % n == 0]


def describe_limits(limits: Limits) -> str:
    named = {"compute": limits.compute_tolerance, "tokens": limits.token_tolerance}
    return ", ".join(f"{what} {share:.3g}" for what, share in named.items() if share is not None)


def count_tiles(task: Task, solver: Solver) -> int:
    """Number of tiles that a solver cuts the batch into, if all masks were causal."""
    lengths = np.asarray(task.batch.lengths, np.int64)
    blocks = -(-lengths // np.maximum(task.block_sizes(solver), 1))
    groups = solver.head_groups or task.config.head_groups or 1
    return int((blocks * (blocks + 1) // 2).sum()) * groups * len(task.batch.masks)


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate with the seconds of its simulated step or, if `pruned`, a lower bound on them.
    `missed` is how far it misses the requested limits. Candidates `left_out` were not placed."""

    name: str
    seconds: float
    missed: float = 0.0
    pruned: bool = False
    left_out: bool = False


@dataclass(frozen=True, eq=False)
class Choice:
    """The best candidate, and all candidates it was chosen from."""

    candidate: Candidate
    tried: tuple[Tried, ...]

    @property
    def simulated(self) -> Simulated:
        return self.candidate.simulated

    def explain(self, most: int = 5) -> str:
        """The fastest candidates, and how many were simulated and pruned."""
        simulated = sorted((t for t in self.tried if not t.pruned), key=lambda t: t.seconds)
        lines = [
            f"{1e3 * t.seconds:10.3f} ms  {t.name}" + (" (over a limit)" if t.missed else "")
            for t in simulated[:most]
        ]
        left_out = sum(t.left_out for t in self.tried)
        pruned = len(self.tried) - len(simulated) - left_out
        lines.append(f"{len(simulated)} candidates simulated, {pruned} ruled out by their bounds")
        if left_out:
            lines.append(f"{left_out} skipped because the batch has too many tiles")
        return "\n".join(lines)
