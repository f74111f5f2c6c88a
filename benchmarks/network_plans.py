"""Plans of one batch by all methods, what they are predicted to take, and how long ranks wait
instead of computing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.cases import SHAPE, Case
from dyncp import PlannerConfig
from dyncp.blocks import DEFAULT_MASK, Direction
from dyncp.cost import CostModel, Profile
from dyncp.placement import Limits, find_solver, static_candidates
from dyncp.plan import Layout, Op, Plan
from dyncp.planner import Candidate, Task, choose
from dyncp.planner.candidate import Placed
from dyncp.planner.search import search_divisions
from dyncp.simulate import AttentionTimes, simulate_plan
from dyncp.topology import Topology

AUTO = "auto"
# Static plans that take so many times longer than the fastest are left out.
MUCH_SLOWER = 2.0


@dataclass(frozen=True, eq=False)
class Predicted:
    """A plan and its simulated calls, forward and backward. Plans of `auto` may be static, too."""

    name: str
    static: bool
    plan: Plan
    times: tuple[AttentionTimes, AttentionTimes]

    @property
    def seconds(self) -> float:
        return sum(times.seconds for times in self.times)


def make_profile(topology: Topology, flops: float) -> Profile:
    """Computation at `flops` per second in both directions, row work for nothing."""
    return Profile(
        name=topology.name,
        attention_forward=flops,
        attention_backward=flops,
        dense=flops,
        copy=1e18,
        call_seconds=0.0,
        kernel_tile=32,
        ranks_per_machine=topology.ranks_per_machine,
        intra=topology.intra,
        inter=topology.inter,
        nics=topology.nics,
        ordered_phases=topology.ordered_phases,
    )


def make_plans(case: Case, topology: Topology, profile: Profile) -> list[Predicted]:
    """One for every method, `auto` first; methods that give the same plan are one."""
    cost = CostModel(profile, SHAPE)
    batch = case.batch()

    def task(**options: object) -> Task:
        return Task.of(batch, topology, SHAPE, PlannerConfig(**options), cost)  # type: ignore[arg-type]

    found: dict[str, Predicted] = {}
    for name, candidate in _candidates(task):
        plan = candidate.lower(Layout())
        if plan.digest not in found:
            static = candidate.placement.static
            found[plan.digest] = _predict(name, static, plan, topology, cost)
    fastest = min(one.seconds for one in found.values())
    return [p for p in found.values() if not p.static or p.seconds < MUCH_SLOWER * fastest]


def _candidates(task: Callable[..., Task]) -> Iterator[tuple[str, Candidate]]:
    plain = task()
    chosen = choose(plain).candidate
    yield f"{AUTO} ({chosen.placement.solver})", chosen
    yield "auto, quality", choose(task(effort="quality")).candidate
    for name in ("rows", "bisection", "bisection_quality", "whole_documents"):
        placed = plain.place(find_solver(name), Limits(0.1, 0.2))
        yield from _dynamic(plain, name, placed)
    statics = static_candidates(plain.batch.lengths, plain.shape, plain.topology)
    scheduled = [plain.schedule(plain.place(solver)) for solver in statics]
    best = min(scheduled, key=lambda one: plain.simulate(one).step_seconds)
    yield from _dynamic(plain, best.placement.solver, best.placed)
    for candidate in scheduled:
        yield candidate.placement.solver, candidate


def _dynamic(task: Task, name: str, placed: Placed) -> Iterator[tuple[str, Candidate]]:
    """A placement, and what moves make of it."""
    if not placed.placement.static:
        yield name, search_divisions(task, placed).candidate
    improved = task.improve(placed)
    if improved is not None:
        yield f"timed from {name}", search_divisions(task, improved).candidate


def _predict(name: str, static: bool, plan: Plan, topology: Topology, cost: CostModel) -> Predicted:
    forward, backward = simulate_plan(plan, topology, cost).attention[DEFAULT_MASK]
    assert backward is not None
    return Predicted(name, static, plan, (forward, backward))


def call_seconds(predicted: Predicted, rank: int) -> tuple[list[float], list[float]]:
    """What every kernel call of a rank takes, in the order of its programs, forward and
    backward: a division's seconds are shared evenly by its head groups."""
    mask = predicted.plan.parts[rank].mask_plan(DEFAULT_MASK)
    found: tuple[list[float], list[float]] = ([], [])
    for direction in Direction:
        flow, division_of = predicted.times[direction].flow, mask.program(direction).tile_division
        own = slice(*flow.programs.first[rank : rank + 2])
        for op, division, seconds in zip(
            flow.programs.op[own], flow.programs.argument[own], flow.work[own], strict=True
        ):
            if op == Op.COMPUTE:
                calls = len(np.unique(mask.tiles.head_group[division_of == division]))
                found[direction].extend([float(seconds) / calls] * calls)
    return found
