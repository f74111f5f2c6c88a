"""The search for the candidate with the shortest simulated step, static methods included.

Dynamic candidates come first: solver `owner_computes` under the requested limits and under tighter
ones. If links are slow, moves improve the best of them and placements of other solvers
(placement/improve_by_time.py). The best candidate is then scheduled with more and with fewer
divisions. A static method is placed, scheduled and simulated only if its lower bound
(placement/static_bounds.py) is below the best step so far. If a static method is best, moves
improve it as well. So no static method that keeps the limits is predicted to be faster than the
choice.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from threading import Thread

import numpy as np

from dyncp.blocks import build_graph
from dyncp.placement import Limits, Solver, StaticBounds, find_solver, static_candidates, whole_rows
from dyncp.planner.bounds import (
    bound_misses,
    part_seconds,
    per_token_seconds,
    reachable_seconds,
    static_seconds,
)
from dyncp.planner.choice import (
    WAYS_TO_KEEP_LIMITS,
    Choice,
    Tried,
    count_tiles,
    describe_limits,
    dynamic_candidates,
    other_starts,
)
from dyncp.planner.task import DIVISIONS, Candidate, Part, PartRun, Placed, Task

logger = logging.getLogger(__name__)
_warned: set[str] = set()

# Moves improve a placement if its estimated step takes this many times its computation.
SLOW_LINKS = {"fast": 1.3, "quality": 1.0}
# If the attention of a layer takes more seconds than this, all candidates are worth their time.
LONG_LAYER = 0.05
# On more ranks than this, placing takes long: moves start from other placements only if moves from
# the best one shortened its step to this share.
MANY_RANKS, PAYS = 64, 0.97
OTHER_DIVISIONS = {"fast": (8, 2), "quality": (2, 3, 6, 8, 12)}
# Limits that make the step this many times longer are worth more candidates, and a warning.
COSTLY = 1.3
# The search ends when all candidates together have this many tiles, which take some seconds. If a
# dynamic candidate has more tiles than LARGE, no further ones are tried.
MOST_TILES = {"fast": 6_000_000, "quality": 60_000_000}
LARGE = {"fast": 300_000, "quality": 3_000_000}
# Effort "fast" stops at a step of this many times the ideal, for attention alone and with a model.
NEAR_IDEAL, NEAR_IDEAL_WITH_MODEL = 1.05, 1.01
# Other divisions are not tried if less than this share of attention is exposed communication.
LITTLE_EXPOSED = 0.02


def place_or_warn(
    task: Task, name: str, solver: Solver, limits: Limits, instead: str
) -> Placed | None:
    """Places the batch. If the solver fails or takes too long, logs a warning that names what is
    used `instead`, and returns None. A ValueError is the caller's mistake and is raised."""
    seconds, result = task.config.solver_seconds, Future[Placed]()

    def work() -> None:
        try:
            result.set_result(task.place(solver, limits))
        except BaseException as error:  # raised again below
            result.set_exception(error)

    # If the solver hangs, its thread is abandoned.
    Thread(target=work, name=f"dyncp {name}", daemon=True).start()
    try:
        if not wait([result], seconds).done:
            raise TimeoutError(f"solver {name} took longer than {seconds:g} s")
        return result.result()
    except ValueError:
        raise
    except Exception as error:
        logger.warning(
            "solver %s failed (%s: %s); planning continues with %s",
            name,
            type(error).__name__,
            error,
            instead,
        )
        return None


class Search:
    """Looks at candidates one by one and keeps the best: limits first, then time."""

    def __init__(self, task: Task) -> None:
        self._task, self._tried, self._tiles = task, list[Tried](), 0
        self._best: Candidate | None = None
        # Whether a dynamic candidate had so many tiles that no further ones are tried.
        self._is_large = False

    def run(self) -> None:
        """Looks at all candidates that are worth their planning time."""
        task = self._task
        if task.topology.num_ranks == 1:  # nothing to place: sequences stay whole
            self.consider("owner_computes", find_solver("owner_computes"), task.config.limits)
            return
        for name, solver, limits in dynamic_candidates(task):
            if self._is_near_ideal or self._is_large:
                break
            placed = self._place(name, solver, limits)
            if placed is None:
                continue
            if placed.num_tiles > LARGE[task.config.effort]:
                self._is_large = True
                self.try_static(placed)
            self.follow(name, placed)
        if self._best is not None:
            if self._best.key[0] > 0 or self._limits_cost > COSTLY:
                for name in WAYS_TO_KEEP_LIMITS:
                    self.consider(name, find_solver(name), task.config.limits)
            if not (self._is_near_ideal or self._is_large):
                self.try_improved()
            self.try_divisions()
        if not self._is_large:
            self.try_static()
        self.try_improved_static()
        self._warn_of_limits()

    def consider(self, name: str, solver: Solver, limits: Limits) -> Placed | None:
        """Places the batch and, if that can be the best, schedules and simulates it."""
        placed = self._place(name, solver, limits)
        if placed is not None:
            self.follow(name, placed)
        return placed

    def _place(self, name: str, solver: Solver, limits: Limits) -> Placed | None:
        """Places the batch; None if the solver fails, or if there were too many tiles so far."""
        tiles = count_tiles(self._task, solver)
        if self._best is not None and self._tiles + tiles > MOST_TILES[self._task.config.effort]:
            self._tried.append(Tried(name, np.inf, pruned=True, left_out=True))
            return None
        self._tiles += tiles
        if solver.degrees is not None:  # static methods cannot hang, and a thread costs 1 to 3 ms
            return self._task.place(solver, limits)
        return place_or_warn(self._task, name, solver, limits, "other candidates")

    def follow(self, name: str, placed: Placed) -> None:
        """Schedules and simulates a placement part by part, while it can still be the best."""
        task, runs = self._task, dict[Part, PartRun]()
        least = part_seconds(task, placed)
        seconds = sum(least.values()) + per_token_seconds(task, placed)
        missed = placed.balance.missed
        best = (np.inf, np.inf) if self._best is None else self._best.key
        for part in task.parts:
            if (missed, seconds) >= best:
                self._tried.append(Tried(name, seconds, missed, pruned=True))
                return
            runs[part] = task.run_part(placed, part)
            seconds += task.layers[part[0]] * runs[part].times.seconds - least[part]
        self._keep(name, placed, runs)

    def _keep(self, name: str, placed: Placed, runs: Mapping[Part, PartRun]) -> None:
        found = self._task.join(placed, runs)
        missed, seconds = found.key
        self._tried.append(Tried(name, seconds, missed))
        if self._best is None or found.key < self._best.key:
            self._best = found

    def try_improved(self) -> None:
        """Improves the best placement by moves and, if that finds any, other starts as well."""
        assert self._best is not None
        task, best, before = self._task, self._best, self._best.simulated
        worth = 1.0 if before.layer_seconds > LONG_LAYER else SLOW_LINKS[task.config.effort]
        if not self._improve(best.placement.solver, best.placed, worth):
            return
        paid = self._best.simulated.step_seconds < PAYS * before.step_seconds
        if task.topology.num_ranks > MANY_RANKS and not paid:
            return
        for solver, limits in other_starts(task):
            placed = self.consider(solver.name, solver, limits)
            if placed is not None:
                self._improve(solver.name, placed)

    def try_improved_static(self) -> None:
        """Improves a static method by moves, if one is best. One that splits heads has as many
        tiles more, and moves did not improve any."""
        best = self._best
        if best is None or not best.placement.static or len(best.graph.head_groups) > 1:
            return
        if self._improve(best.placement.solver, best.placed):
            self.try_divisions()

    def _improve(self, name: str, placed: Placed, worth: float = 1.0) -> bool:
        """Whether moves found another placement, which is then followed."""
        improved = self._task.improve(placed, worth, self._best)
        if improved is None:
            return False
        self.follow(f"improved from {name}", improved)
        return True

    def try_divisions(self) -> None:
        """Schedules the best candidate, if it is dynamic, with more and with fewer divisions. Every
        mask and direction keeps its own best."""
        best = self._best
        assert best is not None
        if best.placement.static or self._task.config.divisions is not None:
            return
        most = max(run.input_steps for run in best.runs.values())
        if most < 2:
            return
        runs = {
            part: self._best_divisions(best.placed, part, run, most)
            for part, run in best.runs.items()
        }
        if runs == best.runs:
            return
        steps = {run.divisions for run in runs.values()}
        how = f"{steps.pop()} steps" if len(steps) == 1 else "other steps by direction"
        self._keep(f"{best.placement.solver} in {how}", best.placed, runs)

    def _best_divisions(self, placed: Placed, part: Part, run: PartRun, steps: int) -> PartRun:
        """The fastest schedule of one part, or `run` if its communication is hidden already.
        `steps` is the largest number of divisions that wait for inputs in any part now."""
        effort, best = self._task.config.effort, run
        if run.times.exposed_seconds < LITTLE_EXPOSED * run.times.seconds:
            return run
        for divisions in OTHER_DIVISIONS[effort]:
            if divisions > DIVISIONS > steps + 1:
                continue  # more divisions were allowed already, and not used
            tiles = len(placed.graph.tiles[part[0]])
            if self._tiles + tiles > MOST_TILES[effort]:
                continue
            self._tiles += tiles
            other = self._task.run_part(placed, part, divisions)
            if other.times.seconds < best.times.seconds:
                best = other
                if effort == "fast":  # if more divisions are faster, fewer are not
                    break
        return best

    def try_static(self, dynamic: Placed | None = None) -> None:
        """Tries static methods, the most promising first, until none can be better. Methods that
        cut finer than the `dynamic` placement come last."""
        task, hopeful, most = self._task, [], np.inf
        if dynamic is not None:
            graph, most = dynamic.graph, 1.1 * dynamic.num_tiles
        elif self._best is not None:
            graph = self._best.graph
        else:
            graph = build_graph(task.batch, task.shape, task.batch.lengths)
        bounds = StaticBounds(graph, task.topology)
        pairs = {name: float(whole_rows(graph, name)[0].sum()) for name in graph.tiles}
        for solver in static_candidates(task.batch.lengths, task.shape, task.topology):
            assert solver.degrees is not None, f"{solver.name} is not static"
            bound = bounds.of(solver.degrees)
            missed, seconds = bound_misses(task, bound), static_seconds(task, bound, pairs)
            hopeful.append((missed, count_tiles(task, solver) > most, seconds, solver))
        for missed, _, seconds, solver in sorted(hopeful, key=lambda entry: entry[:3]):
            if self._best is not None and (missed, seconds) >= self._best.key:
                self._tried.append(Tried(solver.name, seconds, missed, pruned=True))
            else:
                self.consider(solver.name, solver, task.config.limits)

    def choice(self) -> Choice:
        if self._best is None:
            raise RuntimeError("no solver could plan this batch; see the warnings logged before")
        return Choice(self._best, tuple(self._tried))

    @property
    def is_worth_more(self) -> bool:
        """Whether layers take so long that more candidates are worth their planning time."""
        task, best = self._task, self._best
        if best is None or task.config.effort != "fast" or self._is_near_ideal or self._is_large:
            return False
        few = 1 < task.topology.num_ranks <= MANY_RANKS
        return few and best.simulated.layer_seconds > LONG_LAYER

    @property
    def _limits_cost(self) -> float:
        """Seconds of the best candidate over those of the fastest, which may miss limits."""
        assert self._best is not None
        least = min(tried.seconds for tried in self._tried if not tried.pruned)
        return self._best.key[1] / least if least else 1.0  # masks may allow nothing at all

    def _warn_of_limits(self) -> None:
        """Logs how much longer limits make the step, if that is much; once for the same limits."""
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
    def _is_near_ideal(self) -> bool:
        """Whether the best keeps the limits and no other dynamic candidate can gain much."""
        if self._best is None or self._task.config.effort != "fast":
            return False
        missed, seconds = self._best.key
        task = self._task
        close = NEAR_IDEAL if task.model is None else NEAR_IDEAL_WITH_MODEL
        return missed == 0 and seconds <= close * reachable_seconds(task, self._best.simulated)


def search(task: Task) -> Choice:
    """The candidate with the shortest simulated step. For long layers effort "fast" also searches
    with "quality"."""
    found = Search(task)
    found.run()
    first = found.choice()
    if not found.is_worth_more:
        return first
    found = Search(replace(task, config=replace(task.config, effort="quality")))
    found.run()
    second = found.choice()
    best = min(first.candidate, second.candidate, key=lambda candidate: candidate.key)
    return Choice(best, first.tried + second.tried)


def search_divisions(task: Task, placed: Placed) -> Choice:
    """One placement with its best number of divisions."""
    found = Search(task)
    found.follow(placed.placement.solver, placed)
    found.try_divisions()
    return found.choice()
