"""Choice: the best candidate, and what it was chosen from."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int64
from dyncp.placement import Limits, Solver, find_solver
from dyncp.planner.task import Candidate, Cut, Task
from dyncp.simulate import Simulated

# Shares of the compute tolerance that `owner_computes` is tried with.
TIGHTER = (1.0, 0.5)
# Tolerances (compute, tokens) tried besides where none are asked for: imbalance can be cheaper than
# bytes.
LOOSE = (0.2, 0.4)
# Where moves start besides the best placement: sequences cut less, tiles on any rank.
FEW_STARTS = (("owner_computes", Limits(1.0, 2.0)), ("bisection", Limits(*LOOSE)))
MORE_STARTS = (("owner_computes", Limits(0.1, 0.2)), ("owner_computes_fine", Limits(*LOOSE)))
OTHER_STARTS = {"fast": FEW_STARTS, "quality": FEW_STARTS + MORE_STARTS}
# Token tolerances that are tried when tokens cost time: the fullest rank sets that of all per-token
# work.
TOKENS = {"fast": (0.01, 0.005), "quality": (0.05, 0.02, 0.01, 0.005, 0.0025)}

# Tried where limits are missed or cost much: smaller blocks, and tiles that may run anywhere.
WAYS_TO_KEEP_LIMITS = ("owner_computes_fine", "bisection_quality")


def dynamic_candidates(task: Task) -> Iterator[tuple[str, Solver, Limits, Cut | None]]:
    """Name, solver, limits and cut of dynamic candidates, the most promising first."""
    config = task.config
    solver = find_solver("owner_computes" if task.model is None else "owner_computes_fine")
    for limits in dict.fromkeys(_tolerances(task)):
        yield f"{solver.name} within {describe_limits(limits)}", solver, limits, None
    if config.effort == "fast":
        return
    name, limits = "bisection_quality", Limits(*config.limits.tolerances)
    yield name, find_solver(name), limits, None
    if config.head_groups is None:
        for groups in head_group_counts(task)[1:]:
            cut = Cut(config.block_size, groups)
            yield f"{name} with {groups} head groups", find_solver(name), limits, cut


def _tolerances(task: Task) -> Iterator[Limits]:
    """Tolerances that `owner_computes` is tried with: looser than usual where none are asked for,
    which is the best most often, and tighter."""
    asked, effort = task.config.limits, task.config.effort
    compute, tokens = asked.tolerances.tolist()
    free = asked.compute_tolerance is None
    if task.model is None:
        if free:
            yield Limits(LOOSE[0], LOOSE[1] if asked.token_tolerance is None else tokens)
        yield from (Limits(share * compute, tokens) for share in TIGHTER)
        return
    for most in TOKENS[effort]:
        yield Limits(compute, min(tokens, most))
    if free:
        yield Limits(LOOSE[0], min(tokens, TOKENS[effort][-1]))


def other_starts(task: Task) -> Iterator[tuple[str, Limits, Cut | None]]:
    """Solvers, with limits and cuts, from whose placements moves start besides the best one's."""
    if task.config.limits.compute_tolerance is not None:
        yield from ((name, task.config.limits, None) for name in WAYS_TO_KEEP_LIMITS)
        return
    yield from ((name, limits, None) for name, limits in OTHER_STARTS[task.config.effort])
    # Sequences that stay whole need no borders of blocks, which cost kernel tiles.
    yield "uncut", Limits(), Cut(max(task.batch.lengths), task.config.head_groups or 1)


def head_group_counts(task: Task) -> list[int]:
    """Into how many groups the kv heads can be split."""
    if not task.shape.exact:
        return [1]
    return [n for n in range(1, task.shape.kv_heads + 1) if task.shape.kv_heads % n == 0]


def describe_limits(limits: Limits) -> str:
    named = {"compute": limits.compute_tolerance, "tokens": limits.token_tolerance}
    return ", ".join(f"{what} {share:.3g}" for what, share in named.items() if share is not None)


def count_tiles(task: Task, solver: Solver, sizes: Int64) -> int:
    """Tiles of a batch that a solver cuts into blocks of these sizes, if all masks were causal."""
    lengths = np.asarray(task.batch.lengths, np.int64)
    blocks = -(-lengths // np.maximum(sizes, 1))
    groups = solver.head_groups or task.config.head_groups or 1
    return int((blocks * (blocks + 1) // 2).sum()) * groups * len(task.batch.masks)


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate: seconds of its simulated step, or (pruned) a lower bound; `missed` says by how
    much it misses the requested limits. Those `left_out` were skipped."""

    name: str
    seconds: float
    missed: float = 0.0
    pruned: bool = False
    left_out: bool = False


@dataclass(frozen=True, eq=False)
class Choice:
    """The best candidate, and all that it was chosen from."""

    candidate: Candidate
    tried: tuple[Tried, ...]

    @property
    def simulated(self) -> Simulated:
        return self.candidate.simulated

    def better(self, other: "Choice") -> "Choice":
        """The better of two choices for the same batch; it knows of all candidates."""
        best = min(self.candidate, other.candidate, key=lambda candidate: candidate.key)
        return Choice(best, self.tried + other.tried)

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
