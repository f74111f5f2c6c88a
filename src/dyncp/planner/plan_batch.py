"""Plans a batch: batch → blocks → placement → schedules → plan."""

from dyncp.blocks import AttentionShape, Batch
from dyncp.cost import PROFILES, CostModel, ModelConfig, find_profile
from dyncp.placement import Solver, find_solver
from dyncp.plan import Plan
from dyncp.planner.candidate import make_candidate
from dyncp.planner.config import AUTO, PlannerConfig
from dyncp.planner.search import search
from dyncp.topology import Topology

DEFAULT_PROFILE = "p4de"


def plan_batch(
    batch: Batch,
    topology: Topology,
    shape: AttentionShape | None = None,
    config: PlannerConfig | None = None,
    *,
    cost: CostModel | None = None,
    model: ModelConfig | None = None,
) -> Plan:
    """Plans a batch. The result depends on the arguments only.

    `cost` and `model` price the candidates of solver "auto"; by default the profile that has the
    topology's name (p4de's where none has), and attention alone.
    """
    shape, config = shape or AttentionShape.assumed(), config or PlannerConfig()
    if config.solver != AUTO:
        return plan_with(find_solver(config.solver), batch, topology, shape, config)
    cost = cost or default_cost(topology, shape)
    return search(batch, topology, shape, config, cost, model).candidate.lower(config.layout)


def default_cost(topology: Topology, shape: AttentionShape) -> CostModel:
    """Costs by the profile that has the topology's name; bare topologies have p4de's links."""
    name = topology.name if topology.name in PROFILES else DEFAULT_PROFILE
    return CostModel(find_profile(name), shape)


def plan_with(
    solver: Solver, batch: Batch, topology: Topology, shape: AttentionShape, config: PlannerConfig
) -> Plan:
    """Plans a batch with this solver instead of the config's."""
    return make_candidate(solver, batch, topology, shape, config).lower(config.layout)
