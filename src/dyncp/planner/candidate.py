"""Candidates: a batch placed, then scheduled, but not yet lowered to per-rank plans."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import process_time

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import AttentionShape, Batch, BlockGraph, Direction, build_graph
from dyncp.placement import Balance, Placement, Solver, check_placement, measure_balance
from dyncp.plan import Layout, Plan, lower
from dyncp.planner.config import PlannerConfig
from dyncp.schedule import BUILDERS, Pace, Schedule
from dyncp.topology import Topology


@dataclass(frozen=True, eq=False)
class Placed:
    """A batch cut and placed. `cpu_seconds` says what each stage took."""

    graph: BlockGraph
    placement: Placement
    balance: Balance
    cpu_seconds: Mapping[str, float]

    def schedule(self, config: PlannerConfig, pace: "Pace | None" = None) -> "Candidate":
        start = process_time()
        build = BUILDERS[self.placement.pattern]
        schedules = {}
        for name in self.graph.tiles:
            forward, backward = (
                None
                if direction is Direction.BACKWARD and config.forward_only
                else build(self.graph, self.placement, name, direction, config.divisions, pace)
                for direction in Direction
            )
            assert forward is not None
            schedules[name] = (forward, backward)
        seconds = dict(self.cpu_seconds) | {"schedule": process_time() - start}
        return Candidate(self.graph, self.placement, schedules, self.balance, seconds)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placed batch with its schedules: what simulation needs to know of a plan."""

    graph: BlockGraph
    placement: Placement
    schedules: Mapping[str, tuple[Schedule, Schedule | None]]
    balance: Balance
    cpu_seconds: Mapping[str, float]

    def lower(self, layout: Layout) -> Plan:
        return lower(self.graph, self.placement, self.schedules, self.balance, layout)


def place_batch(
    solver: Solver, batch: Batch, topology: Topology, shape: AttentionShape, config: PlannerConfig
) -> Placed:
    """Cuts and places a batch. A method that splits heads says itself into how many groups."""
    marks = [process_time()]
    solver = solver.fitted(shape, topology)
    sizes = _block_sizes(batch, topology, solver, config)
    head_groups = config.head_groups if solver.head_groups is None else solver.head_groups
    graph = build_graph(batch, shape, sizes.tolist(), head_groups)
    marks.append(process_time())
    placement = solver.place(graph, topology, config.limits, config.seed)
    check_placement(graph, placement)
    balance = measure_balance(graph, placement, config.limits)
    marks.append(process_time())
    seconds = dict(zip(("blocks", "placement"), np.diff(marks).tolist(), strict=True))
    return Placed(graph, placement, balance, seconds)


def make_candidate(
    solver: Solver, batch: Batch, topology: Topology, shape: AttentionShape, config: PlannerConfig
) -> Candidate:
    """Cuts, places and schedules a batch."""
    return place_batch(solver, batch, topology, shape, config).schedule(config)


def _block_sizes(batch: Batch, topology: Topology, solver: Solver, config: PlannerConfig) -> Int64:
    if config.block_size is None:
        return solver.block_sizes(batch.lengths, topology.num_ranks)
    return np.full(len(batch.lengths), config.block_size, np.int64)
