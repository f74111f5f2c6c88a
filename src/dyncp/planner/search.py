"""Search: the candidate of the shortest simulated step, static methods included.

Dynamic candidates come first: solver `owner_computes` under the requested limits and under tighter
ones. The best of them is scheduled in fewer and in more steps. Where links are slow, placements are
improved by moves (see placement/improve_by_time.py), from there and from other starts. A static
method is only placed, scheduled and simulated when what it needs at least (see
placement/static_bounds.py) is less than the best so far, and where one is best, moves go on from
it. So no static method that keeps the limits is predicted to be faster than the choice (by more
than a sixth, where it cuts a batch into ten times as many tiles).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Thread
from typing import TypeVar

import numpy as np

from dyncp.blocks import BlockGraph, build_graph
from dyncp.placement import (
    Limits,
    Solver,
    StaticBounds,
    find_solver,
    measure_balance,
    static_candidates,
)
from dyncp.planner.bounds import StaticSeconds, bound_misses, part_seconds, per_token_seconds
from dyncp.planner.choice import (
    WAYS_TO_KEEP_LIMITS,
    Choice,
    Tried,
    count_tiles,
    describe_limits,
    dynamic_candidates,
    other_starts,
)
from dyncp.planner.task import DIVISIONS, Candidate, Cut, Part, PartRun, Placed, Task, log

Found = TypeVar("Found")

logger = logging.getLogger(__name__)
_warned: set[str] = set()

# Placements are improved by moves if the estimated step takes this many times its computation.
SLOW_LINKS = {"fast": 1.45, "quality": 1.0}
# Layers whose attention takes more seconds than this are worth all candidates in any case.
LONG_LAYER = 0.05
# On more ranks than this, where placing takes long, moves start from other placements only if
# moves from the best one shortened its step to this share.
MANY_RANKS, PAYS = 64, 0.97
# Least share of the simulated step that the estimate must explain: it has no latencies or launches.
LEAST_ESTIMATE = 0.5
OTHER_DIVISIONS = {"fast": (8, 2), "quality": (2, 3, 6, 8, 12)}
# Limits that cost more than this factor are worth more candidates, and a warning.
COSTLY = 1.3
# Candidates end when all of them together have this many tiles: some seconds of work. With more
# tiles than LARGE only the first dynamic candidate is tried.
MOST_TILES = {"fast": 6_000_000, "quality": 60_000_000}
LARGE = {"fast": 300_000, "quality": 3_000_000}
# Effort "fast" stops at a step of this many times the ideal, for attention alone and with a model.
NEAR_IDEAL, NEAR_IDEAL_WITH_MODEL = 1.05, 1.01
# A placement with this many times the best one's tiles is skipped if its lower bound is above this
# share of the best step.
MUCH_FINER, LITTLE_GAIN = 10, 0.85
# Other divisions are not tried if less than this share of attention is exposed communication.
LITTLE_EXPOSED = 0.02


class SolverTimeoutError(RuntimeError):
    """A solver did not answer in time."""


def run_bounded(call: Callable[[], Found], seconds: float, name: str) -> Found:
    """The result of `call`; SolverTimeoutError if it takes longer, and its thread is abandoned."""
    found: list[Found] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:  # handed on to the caller's thread
            failed.append(error)

    thread = Thread(target=work, name=f"dyncp {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise SolverTimeoutError(f"solver {name} took longer than {seconds:g} s")
    return found[0]


def warn_replaced(name: str, error: Exception, instead: str) -> None:
    log.warning(
        "solver %s failed (%s: %s); planning continues with %s",
        name,
        type(error).__name__,
        error,
        instead,
    )


class Search:
    """Looks at candidates one by one and keeps the best: limits first, then time."""

    def __init__(self, task: Task) -> None:
        self._task, self._tried, self._tiles = task, list[Tried](), 0
        self._best: Candidate | None = None
        # Whether dynamic candidates have so many tiles that few of them are looked at.
        self.is_large = False

    def consider(
        self,
        name: str,
        solver: Solver,
        limits: Limits,
        cut: Cut | None = None,
        *,
        dynamic: bool = False,
    ) -> None:
        """Places the batch and, if that can be the best, schedules and simulates it. Before a large
        `dynamic` placement static methods are tried."""
        placed = self._place(name, solver, limits, cut)
        if placed is None:
            return
        if dynamic and placed.num_tiles > LARGE[self._task.config.effort]:
            self.is_large = True
            self.try_static(placed)
        self.follow(name, placed)

    def _place(
        self, name: str, solver: Solver, limits: Limits, cut: Cut | None = None
    ) -> Placed | None:
        """The batch placed by a solver; one that fails is skipped with a warning."""
        task = self._task
        if self._leaves_out(name, solver):
            return None
        if solver.degrees is not None:  # static methods cannot hang
            return task.place(solver, limits, cut)
        try:
            placed = run_bounded(
                lambda: task.place(solver, limits, cut), task.config.solver_seconds, name
            )
        except ValueError:  # a wrong option, not a failure
            raise
        except Exception as error:
            warn_replaced(name, error, "other candidates")
            return None
        if limits == task.config.limits:
            return placed
        # Candidates compare by the requested limits.
        balance = measure_balance(
            placed.graph, placed.placement, task.config.limits, task.topology.rank_speeds
        )
        return replace(placed, balance=balance)

    def _leaves_out(self, name: str, solver: Solver) -> bool:
        """Whether a candidate has too many tiles; counts them otherwise."""
        tiles = count_tiles(self._task, solver, self._task.block_sizes(solver))
        if self._best is not None and self._tiles + tiles > MOST_TILES[self._task.config.effort]:
            self._tried.append(Tried(name, np.inf, pruned=True, left_out=True))
            return True
        self._tiles += tiles
        return False

    def follow(self, name: str, placed: Placed) -> Candidate | None:
        """Schedules and simulates a placement part by part, while it can still be the best."""
        task, runs = self._task, dict[Part, PartRun]()
        least = part_seconds(task, placed)
        seconds = sum(least.values()) + per_token_seconds(task, placed)
        missed, best = (
            placed.balance.missed,
            (np.inf, np.inf) if self._best is None else self._best.key,
        )
        for part in task.parts:
            if (missed, seconds) >= best or self._too_fine(placed, seconds):
                self._tried.append(Tried(name, seconds, missed, pruned=True))
                return None
            runs[part] = task.run_part(placed, part)
            seconds += task.layers[part[0]] * runs[part].times.seconds - least[part]
        return self._keep(name, placed, runs)

    def _keep(self, name: str, placed: Placed, runs: Mapping[Part, PartRun]) -> Candidate:
        found = self._task.join(placed, runs)
        missed, seconds = found.key
        self._tried.append(Tried(name, seconds, missed))
        if self._best is None or found.key < self._best.key:
            self._best = found
        return found

    def _too_fine(self, placed: Placed, seconds: float) -> bool:
        """Whether scheduling a placement would take longer than all the rest, for little gain."""
        if self._best is None or placed.balance.missed < self._best.key[0]:
            return False
        is_finer = placed.num_tiles > MUCH_FINER * self._best.placed.num_tiles
        return is_finer and seconds > LITTLE_GAIN * self._best.key[1]

    def try_improved(self) -> None:
        """Improves the best placement by moves and, where links are slow, other starts as well."""
        assert self._best is not None
        task, best, simulated = self._task, self._best, self._best.simulated
        worth, least = SLOW_LINKS[task.config.effort], LEAST_ESTIMATE * simulated.step_seconds
        if simulated.layer_seconds > LONG_LAYER:
            worth = 1.0
        if not self._improve(best.placement.solver, best.placed, worth, least):
            return
        paid = self._best.simulated.step_seconds < PAYS * simulated.step_seconds
        if task.topology.num_ranks > MANY_RANKS and not paid:
            return
        for name, limits, cut in other_starts(task):
            placed = self._place(name, find_solver(name), limits, cut)
            if placed is not None:
                self.follow(name, placed)
                self._improve(name, placed)

    def try_improved_static(self) -> None:
        """Improves a static method by moves, if one is best."""
        assert self._best is not None
        best = self._best
        if not best.placement.static:
            return
        if self._improve(best.solver, best.placed):
            self.try_divisions()

    def _improve(self, name: str, placed: Placed, worth: float = 1.0, least: float = 0.0) -> bool:
        improved = self._task.improve(placed, worth, least)
        if improved is None:
            return False
        self.follow(f"improved from {name}", improved)
        return True

    def try_divisions(self) -> None:
        """Schedules the best candidate, if it is dynamic, in fewer and in more steps."""
        assert self._best is not None
        if not self._best.placement.static:
            self.divide(self._best)

    def divide(self, followed: Candidate) -> None:
        """Schedules a candidate in fewer and in more steps; every part keeps its own best."""
        placed = followed.placed
        if self._task.config.divisions is not None or placed.placement.pattern == "ring":
            return
        most = max(run.input_steps for run in followed.runs.values())
        if most < 2:
            return
        runs = {
            part: self._best_steps(placed, part, run, most) for part, run in followed.runs.items()
        }
        if runs == followed.runs:
            return
        steps = {run.divisions for run in runs.values()}
        how = f"{steps.pop()} steps" if len(steps) == 1 else "other steps by direction"
        self._keep(f"{followed.solver} in {how}", placed, runs)

    def _best_steps(self, placed: Placed, part: Part, run: PartRun, steps: int) -> PartRun:
        """The part in the best number of steps, unless its communication is hidden already. `steps`
        is the largest number of steps that inputs of any part take now."""
        effort, best = self._task.config.effort, run
        if run.times.exposed_seconds < LITTLE_EXPOSED * run.times.seconds:
            return run
        for divisions in OTHER_DIVISIONS[effort]:
            if divisions > DIVISIONS > steps + 1:
                continue  # more steps were allowed already, and not used
            tiles = len(placed.graph.tiles[part[0]])
            if self._tiles + tiles > MOST_TILES[effort]:
                continue
            self._tiles += tiles
            other = self._task.run_part(placed, part, divisions)
            if other.times.seconds < best.times.seconds:
                best = other
                if effort == "fast":  # if fewer are better, more are not
                    break
        return best

    def try_static(self, dynamic: Placed | None = None) -> None:
        """Tries static methods, the most promising first, until none can be better. Those that cut
        finer than the `dynamic` placement come last."""
        task, lengths = self._task, self._task.batch.lengths
        graph, hopeful = self._any_graph() if dynamic is None else dynamic.graph, []
        most = np.inf if dynamic is None else 1.1 * dynamic.num_tiles
        bounds, seconds_of = StaticBounds(graph, task.topology), StaticSeconds(task, graph).of
        for solver in static_candidates(lengths, task.shape, task.topology):
            assert solver.degrees is not None, f"{solver.name} is not static"
            bound, sizes = bounds.of(solver.degrees), task.block_sizes(solver)
            missed, seconds = bound_misses(task, bound), seconds_of(bound, sizes)
            hopeful.append((missed, count_tiles(task, solver, sizes) > most, seconds, solver))
        for missed, _, seconds, solver in sorted(hopeful, key=lambda entry: entry[:3]):
            if self._best is not None and (missed, seconds) >= self._best.key:
                self._tried.append(Tried(solver.name, seconds, missed, pruned=True))
            else:
                self.consider(solver.name, solver, task.config.limits)

    def _any_graph(self) -> BlockGraph:
        if self._best is not None:
            return self._best.graph
        return build_graph(self._task.batch, self._task.shape, self._task.batch.lengths)

    def choice(self) -> Choice:
        if self._best is None:
            raise RuntimeError("no solver could plan this batch; see the warnings logged before")
        return Choice(self._best, tuple(self._tried))

    @property
    def found(self) -> bool:
        return self._best is not None

    @property
    def is_worth_more(self) -> bool:
        """Whether layers take so long that more candidates are worth their time."""
        task, best = self._task, self._best
        if best is None or task.config.effort != "fast" or self.is_near_ideal or self.is_large:
            return False
        few = 1 < task.topology.num_ranks <= MANY_RANKS
        return few and best.simulated.layer_seconds > LONG_LAYER

    @property
    def keeps_limits(self) -> bool:
        """Whether the best keeps the limits and is not much slower for it."""
        return self._best is not None and self._best.key[0] == 0 and self._limits_cost <= COSTLY

    @property
    def _limits_cost(self) -> float:
        """The best candidate's seconds over those of the fastest, which may miss limits."""
        assert self._best is not None
        least = min(tried.seconds for tried in self._tried if not tried.pruned)
        return self._best.key[1] / least if least else 1.0  # masks may allow nothing at all

    def warn_of_limits(self) -> None:
        """Logs what limits cost, if that is much; once for the same limits."""
        if self._best is None or self._best.key[0] or self._limits_cost <= COSTLY:
            return
        limits = describe_limits(self._task.config.limits)
        if limits not in _warned:
            _warned.add(limits)
            logger.warning(
                "the limits (%s) make the step %.1f times as long (%.3f ms); looser limits would "
                "be faster. This is logged once for these limits",
                limits,
                self._limits_cost,
                1e3 * self._best.key[1],
            )

    @property
    def is_near_ideal(self) -> bool:
        """Whether the best keeps the limits and no other dynamic candidate can gain much."""
        if self._best is None or self._task.config.effort != "fast":
            return False
        missed, seconds = self._best.key
        close = NEAR_IDEAL if self._task.model is None else NEAR_IDEAL_WITH_MODEL
        return missed == 0 and seconds <= close * self._best.simulated.ideal_seconds


def search(task: Task) -> Choice:
    """The candidate with the shortest simulated step. For long layers effort "fast" also searches
    with "quality"."""
    found = _search(task)
    if not found.is_worth_more:
        return found.choice()
    other = _search(replace(task, config=replace(task.config, effort="quality")))
    return found.choice().better(other.choice())


def _search(task: Task) -> Search:
    found = Search(task)
    if task.topology.num_ranks == 1:  # nothing to place: sequences stay whole
        found.consider("owner_computes", find_solver("owner_computes"), task.config.limits)
        return found
    for name, solver, limits, cut in dynamic_candidates(task):
        if not (found.is_near_ideal or found.is_large):
            found.consider(name, solver, limits, cut, dynamic=True)
    if found.found and not found.keeps_limits:
        for name in WAYS_TO_KEEP_LIMITS:
            found.consider(name, find_solver(name), task.config.limits)
    if found.found and not (found.is_near_ideal or found.is_large):
        found.try_improved()
    if found.found:
        found.try_divisions()
    if not found.is_large:
        found.try_static()
    found.try_improved_static()
    found.warn_of_limits()
    return found


def search_divisions(task: Task, placed: Placed) -> Choice:
    """The best number of divisions for one placement."""
    found = Search(task)
    followed = found.follow(placed.placement.solver, placed)
    if followed is not None and not placed.placement.static:
        found.divide(followed)
    return found.choice()
