"""Task: what is planned, for what cluster, model and costs."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Thread
from time import process_time
from typing import TypeVar

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import AttentionShape, Batch, BlockGraph, Direction
from dyncp.checks import instance_of
from dyncp.cost import PROFILES, CostModel, ModelConfig, profile_for_device, tell_profile
from dyncp.placement import Limits, Prices, Solver, improve, measure_balance
from dyncp.planner.candidate import (
    DIVISIONS,
    Candidate,
    Cut,
    Graphs,
    Part,
    PartRun,
    Placed,
    Runs,
    choose_sizes,
    place_batch,
)
from dyncp.planner.config import PlannerConfig
from dyncp.schedule import BUILDERS, Pace
from dyncp.simulate import (
    Simulated,
    join_times,
    layers_by_mask,
    rows_per_rank,
    simulate_schedule,
    simulate_schedules,
)
from dyncp.topology import Topology

Found = TypeVar("Found")

log = logging.getLogger("dyncp.planner")


# Runs solvers so that one that fails or hangs does not stop planning.


class SolverTimeoutError(RuntimeError):
    """A solver did not answer in time."""


def run_bounded(call: Callable[[], Found], seconds: float, name: str) -> Found:
    """The result of `call`; where it takes longer, SolverTimeoutError, and its thread is left
    alone."""
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
        "solver %s failed (%s: %s); planning goes on with %s",
        name,
        type(error).__name__,
        error,
        instead,
    )


CHANGE = "pass topology=preset(name, nodes, ranks), or cost=CostModel(profile, shape), for another"


@dataclass(frozen=True, eq=False)
class Task:
    batch: Batch
    topology: Topology
    shape: AttentionShape
    config: PlannerConfig
    cost: CostModel
    model: ModelConfig | None = None
    _graphs: Graphs = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        batch: Batch,
        topology: Topology,
        shape: AttentionShape | None = None,
        config: PlannerConfig | None = None,
        cost: CostModel | None = None,
        model: ModelConfig | None = None,
    ) -> "Task":
        """Costs are by default those of the profile that has the topology's name (p4de's where
        none has). Limits get the token limit that `max_tokens_per_rank` means for this batch."""
        shape = AttentionShape.assumed() if shape is None else shape
        config = PlannerConfig() if config is None else config
        for name, value, kind in (
            ("batch", batch, Batch),
            ("topology", topology, Topology),
            ("shape", shape, AttentionShape),
            ("config", config, PlannerConfig),
        ):
            instance_of(name, value, kind, f"{kind.__name__}")
        config = replace(config, limits=_limits(batch, topology, config))
        return Task(batch, topology, shape, config, cost or default_cost(topology, shape), model)

    @property
    def layers(self) -> dict[str, float]:
        """How many layers of the step use each mask."""
        return layers_by_mask(list(self.batch.masks), self.config.layers, self.model)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Those that are planned."""
        return (Direction.FORWARD,) if self.config.forward_only else tuple(Direction)

    @property
    def parts(self) -> list[Part]:
        """What is scheduled and simulated by itself, the longest first."""
        return [(name, way) for way in reversed(self.directions) for name in self.batch.masks]

    @property
    def pace(self) -> Pace:
        return Pace(self.topology, self.cost)

    def block_sizes(self, solver: Solver) -> Int64:
        """How a solver cuts the sequences."""
        return choose_sizes(self.batch, self.topology, solver, Cut(self.config.block_size))

    def place(self, solver: Solver, limits: Limits | None = None, cut: Cut | None = None) -> Placed:
        config = self.config
        cut = cut or Cut(config.block_size, config.head_groups or 1)
        limits = limits or config.limits
        return place_batch(
            solver,
            self.batch,
            self.topology,
            self.shape,
            limits,
            cut=cut,
            seed=config.seed,
            graphs=self._graphs,
        )

    def improve(self, placed: Placed, worth: float = 1.0, least: float = 0.0) -> Placed | None:
        """The batch placed anew by moves that shorten the estimated step; None where there are
        none, or where it is estimated to take less than `worth` times its computation or than
        `least` seconds."""
        start, graph, limits = process_time(), placed.graph, self.config.limits
        prices = self._prices(graph)
        found = improve(graph, placed.placement, self.topology, limits, prices, worth, least)
        if found is None:
            return None
        balance = measure_balance(graph, found, limits, self.topology.rank_speeds)
        seconds = dict(placed.cpu_seconds)
        seconds["placement"] += process_time() - start
        return Placed(graph, found, balance, seconds)

    def _prices(self, graph: BlockGraph) -> Prices:
        cost, planned = self.cost, self.directions
        seconds = {
            name: np.column_stack(
                [
                    cost.graph_tile_seconds(graph, name, direction) * (direction in planned)
                    for direction in Direction
                ]
            )
            for name in graph.tiles
        }
        return Prices(seconds, self.layers, self.token_seconds, forward_only=len(planned) == 1)

    @property
    def token_seconds(self) -> float:
        """Seconds of a token outside attention."""
        if self.model is None:
            return 0.0
        profile = self.cost.profile
        return sum(self.model.seconds_per_token(profile, d) for d in self.directions)

    def schedule(self, placed: Placed, divisions: int | None = None) -> Candidate:
        divisions = self.config.divisions or divisions
        return placed.schedule(divisions, self.pace, forward_only=self.config.forward_only)

    def simulate(self, candidate: Candidate) -> Simulated:
        return simulate_schedules(
            candidate.graph,
            candidate.placement,
            candidate.schedules,
            self.topology,
            self.cost,
            layers=self.config.layers,
            model=self.model,
            local_multiple=self.config.layout.local_multiple,
        )

    def run_part(self, placed: Placed, part: Part, divisions: int | None = None) -> PartRun:
        """Schedules and simulates one mask and direction."""
        start, (graph, placement) = process_time(), (placed.graph, placed.placement)
        steps = self.config.divisions or divisions or DIVISIONS
        schedule = BUILDERS[placement.pattern](graph, placement, *part, steps, self.pace)
        spent, (name, direction) = process_time() - start, part
        times = simulate_schedule(
            graph, placement, schedule, direction, self.topology, self.cost, name
        )
        return PartRun(steps, schedule, times, spent)

    def join(self, placed: Placed, runs: Runs) -> tuple[Candidate, Simulated]:
        """A placement with the schedules of all its parts, and its step."""
        schedules, attention = {}, {}
        for name in placed.graph.tiles:
            forward, back = runs[name, Direction.FORWARD], runs.get((name, Direction.BACKWARD))
            schedules[name] = forward.schedule, None if back is None else back.schedule
            attention[name] = forward.times, None if back is None else back.times
        seconds = {"schedule": sum(run.cpu_seconds for run in runs.values())}
        candidate = Candidate(placed, schedules, dict(placed.cpu_seconds) | seconds)
        rows = rows_per_rank(placed.graph, placed.placement, self.config.layout.local_multiple)
        step = join_times(attention, rows, self.topology, self.layers, self.token_seconds)
        return candidate, step


def default_cost(topology: Topology, shape: AttentionShape) -> CostModel:
    """Costs by the profile that has the topology's name. Bare topologies have p4de's links and get
    its costs, which the log says where there is something to plan."""
    if topology.name in PROFILES:
        return CostModel(PROFILES[topology.name], shape)
    if topology.num_ranks > 1:
        tell_profile(None, CHANGE)
    return CostModel(profile_for_device(None), shape)


def _limits(batch: Batch, topology: Topology, config: PlannerConfig) -> Limits:
    limits, most = config.limits, config.max_tokens_per_rank
    if most is None:
        return limits
    mean = batch.num_tokens / topology.num_ranks
    if most < mean:
        raise ValueError(
            f"max_tokens_per_rank is {most}, but {batch.num_tokens:,} tokens on "
            f"{topology.num_ranks} ranks are {mean:,.1f} each; use smaller batches or more ranks"
        )
    tolerance = most / mean - 1
    if limits.token_tolerance is not None:
        tolerance = min(tolerance, limits.token_tolerance)
    return replace(limits, token_tolerance=tolerance)
