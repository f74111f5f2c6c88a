"""Chains the stages: batch → blocks → placement → schedules → plan."""

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import AttentionShape, Batch, Direction, build_graph
from dyncp.placement import SOLVERS, check_placement, measure_balance
from dyncp.plan import Plan, lower
from dyncp.planner.config import PlannerConfig
from dyncp.schedule import Schedule, build_schedule
from dyncp.topology import Topology


def plan_batch(
    batch: Batch,
    topology: Topology,
    shape: AttentionShape | None = None,
    config: PlannerConfig | None = None,
) -> Plan:
    """Plans a batch. The result depends on the arguments only."""
    shape, config = shape or AttentionShape.assumed(), config or PlannerConfig()
    sizes = _block_sizes(batch, topology, config)
    graph = build_graph(batch, shape, sizes.tolist(), config.head_groups)
    placement = SOLVERS[config.solver].place(graph, topology, config.limits, config.seed)
    check_placement(graph, placement)
    balance = measure_balance(graph, placement, config.limits)

    def schedule(name: str, direction: Direction) -> Schedule:
        return build_schedule(graph, placement, name, direction, config.divisions)

    schedules = {
        name: (
            schedule(name, Direction.FORWARD),
            None if config.forward_only else schedule(name, Direction.BACKWARD),
        )
        for name in graph.tiles
    }
    return lower(graph, placement, schedules, balance, config.layout)


def _block_sizes(batch: Batch, topology: Topology, config: PlannerConfig) -> Int64:
    if config.block_size is None:
        return SOLVERS[config.solver].block_sizes(batch.lengths, topology.num_ranks)
    return np.full(len(batch.lengths), config.block_size, np.int64)
