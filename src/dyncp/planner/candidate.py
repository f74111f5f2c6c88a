"""Candidate: a placed and scheduled batch, not yet lowered to per-rank plans."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import process_time

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import AttentionShape, Batch, BlockGraph, Direction, build_graph
from dyncp.placement import Balance, Placement, Solver, check_placement, measure_balance
from dyncp.plan import Layout, Plan, lower
from dyncp.planner.config import PlannerConfig
from dyncp.schedule import BUILDERS, Schedule
from dyncp.topology import Topology


@dataclass(frozen=True, eq=False)
class Candidate:
    """What simulation needs to know of a plan. `cpu_seconds` says what each stage took."""

    graph: BlockGraph
    placement: Placement
    schedules: Mapping[str, tuple[Schedule, Schedule | None]]
    balance: Balance
    cpu_seconds: Mapping[str, float]

    def lower(self, layout: Layout) -> Plan:
        return lower(self.graph, self.placement, self.schedules, self.balance, layout)


def make_candidate(
    solver: Solver, batch: Batch, topology: Topology, shape: AttentionShape, config: PlannerConfig
) -> Candidate:
    """Cuts, places and schedules a batch. A method that splits heads says itself into how many
    groups."""
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
    schedules = _schedules(graph, placement, config)
    marks.append(process_time())
    seconds = dict(zip(("blocks", "placement", "schedule"), np.diff(marks).tolist(), strict=True))
    return Candidate(graph, placement, schedules, balance, seconds)


def _schedules(
    graph: BlockGraph, placement: Placement, config: PlannerConfig
) -> dict[str, tuple[Schedule, Schedule | None]]:
    def schedule(name: str, direction: Direction) -> Schedule:
        build = BUILDERS[placement.pattern]
        return build(graph, placement, name, direction, config.divisions)

    return {
        name: (
            schedule(name, Direction.FORWARD),
            None if config.forward_only else schedule(name, Direction.BACKWARD),
        )
        for name in graph.tiles
    }


def _block_sizes(batch: Batch, topology: Topology, solver: Solver, config: PlannerConfig) -> Int64:
    if config.block_size is None:
        return solver.block_sizes(batch.lengths, topology.num_ranks)
    return np.full(len(batch.lengths), config.block_size, np.int64)
