"""Search: the candidate of the shortest simulated step, static methods included.

Dynamic candidates come first: bisection under the limits asked for and under tighter ones, and
whole documents. A static method is only scheduled and simulated when its placement alone, without
any communication, would be faster than the best candidate so far. So no static method is predicted
to be faster than the choice.
"""

from dataclasses import dataclass, replace

import numpy as np

from dyncp.blocks import AttentionShape, Batch, Direction
from dyncp.cost import CostModel, ModelConfig
from dyncp.placement import Limits, Solver, find_solver, measure_balance, static_candidates
from dyncp.planner.candidate import Candidate, Placed, place_batch
from dyncp.planner.config import PlannerConfig
from dyncp.simulate import Simulated, simulate_schedules
from dyncp.topology import Topology

# Tolerances of (compute, tokens) that bisection is tried with besides the limits asked for: tight
# ones pay where links are fast, or where per-token work is most of the step.
TIGHTER = ((None, 0.05), (None, 0.02), (0.03, None), (0.03, 0.05), (0.03, 0.02))


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was looked at: seconds of its simulated step, or (pruned) a lower bound."""

    name: str
    seconds: float
    pruned: bool


@dataclass(frozen=True, eq=False)
class Choice:
    """The best candidate, its simulation, and all that it was chosen from."""

    candidate: Candidate
    simulated: Simulated
    tried: tuple[Tried, ...]

    def explain(self, most: int = 5) -> str:
        """The fastest candidates, and how many were simulated and pruned."""
        simulated = sorted((t for t in self.tried if not t.pruned), key=lambda t: t.seconds)
        lines = [f"{1e3 * t.seconds:10.3f} ms  {t.name}" for t in simulated[:most]]
        pruned = len(self.tried) - len(simulated)
        lines.append(f"{len(simulated)} candidates simulated, {pruned} pruned by their compute")
        return "\n".join(lines)


def search(
    batch: Batch,
    topology: Topology,
    shape: AttentionShape,
    config: PlannerConfig,
    cost: CostModel,
    model: ModelConfig | None = None,
) -> Choice:
    """The candidate with the shortest simulated step."""
    best: tuple[Candidate, Simulated] | None = None
    tried: list[Tried] = []
    for name, solver, own in _candidates(batch, topology, shape, config):
        placed = place_batch(solver, batch, topology, shape, own)
        if own.limits != config.limits:  # what counts are the limits asked for
            balance = measure_balance(placed.graph, placed.placement, config.limits)
            placed = replace(placed, balance=balance)
        bound = least_seconds(placed, topology, cost, model, forward_only=config.forward_only)
        if best is not None and bound >= best[1].step_seconds:
            tried.append(Tried(name, bound, pruned=True))
            continue
        candidate = placed.schedule(own)
        simulated = simulate_schedules(
            candidate.graph, candidate.placement, candidate.schedules, topology, cost, model=model
        )
        tried.append(Tried(name, simulated.step_seconds, pruned=False))
        if best is None or simulated.step_seconds < best[1].step_seconds:
            best = candidate, simulated
    assert best is not None
    return Choice(*best, tuple(tried))


def _candidates(
    batch: Batch, topology: Topology, shape: AttentionShape, config: PlannerConfig
) -> list[tuple[str, Solver, PlannerConfig]]:
    bisection = find_solver("bisection")
    found = [("bisection", bisection, config)]
    for compute, tokens in TIGHTER:
        limits = Limits(
            _tighter(config.limits.compute_tolerance, compute),
            _tighter(config.limits.token_tolerance, tokens),
        )
        if limits != config.limits:
            own = replace(config, limits=limits)
            found.append((f"bisection within {_describe(limits)}", bisection, own))
    others = [find_solver("whole_documents"), *static_candidates(batch.lengths, shape, topology)]
    return found + [(solver.name, solver, config) for solver in others]


def _tighter(asked: float | None, wanted: float | None) -> float | None:
    if asked is None or wanted is None:
        return asked if wanted is None else wanted
    return min(asked, wanted)


def _describe(limits: Limits) -> str:
    named = {"compute": limits.compute_tolerance, "tokens": limits.token_tolerance}
    return ", ".join(f"{what} {share:g}" for what, share in named.items() if share is not None)


def least_seconds(
    placed: Placed,
    topology: Topology,
    cost: CostModel,
    model: ModelConfig | None,
    *,
    forward_only: bool,
) -> float:
    """Step seconds of the fullest ranks without communication: no schedule can be faster."""
    graph, placement, ranks = placed.graph, placed.placement, topology.num_ranks
    name = next(iter(graph.tiles))
    attention = 0.0
    directions = [Direction.FORWARD] if forward_only else list(Direction)
    for direction in directions:
        seconds = cost.graph_tile_seconds(graph, name, direction)
        by_rank = np.bincount(placement.tile_rank[name], seconds, ranks)
        attention += float((by_rank / topology.rank_speeds).max())
    if model is None:
        return attention
    tokens = np.bincount(placement.block_rank, graph.blocks.tokens, ranks) / topology.rank_speeds
    per_token = sum(model.seconds_per_token(cost.profile, direction) for direction in directions)
    return model.layers * attention + per_token * float(tokens.max())
