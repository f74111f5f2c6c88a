"""Plans a batch: batch → blocks → placement → schedules → plan."""

from dyncp.blocks import AttentionShape, Batch
from dyncp.placement import Solver, find_solver
from dyncp.plan import Plan
from dyncp.planner.candidate import make_candidate
from dyncp.planner.config import PlannerConfig
from dyncp.topology import Topology


def plan_batch(
    batch: Batch,
    topology: Topology,
    shape: AttentionShape | None = None,
    config: PlannerConfig | None = None,
) -> Plan:
    """Plans a batch. The result depends on the arguments only."""
    shape, config = shape or AttentionShape.assumed(), config or PlannerConfig()
    return plan_with(find_solver(config.solver), batch, topology, shape, config)


def plan_with(
    solver: Solver, batch: Batch, topology: Topology, shape: AttentionShape, config: PlannerConfig
) -> Plan:
    """Plans a batch with this solver instead of the config's."""
    return make_candidate(solver, batch, topology, shape, config).lower(config.layout)
