"""Plans that know their nodes, and what the scheduler thinks of time there."""

from dataclasses import replace

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology
from dyncp.cost import CostModel, find_profile
from dyncp.placement import find_solver
from dyncp.planner import Cut, place_batch
from dyncp.schedule import Pace

# Times the FLOP/s of p4de: slow links leave room for all phases, fast ones for few.
SLOW_LINKS, FAST_LINKS = 1e3, 1e-9


def pace_of(topology: Topology, shape: AttentionShape, rate: float = SLOW_LINKS) -> Pace:
    """Kernel calls cost nothing, so that the smallest batch is worth several phases."""
    p4de = find_profile("p4de")
    profile = replace(
        p4de,
        call_seconds=0.0,
        kernel_tile=1,
        attention_forward=p4de.attention_forward * rate,
        attention_backward=p4de.attention_backward * rate,
    )
    return Pace(topology, CostModel(profile, shape))


def plan_paced(
    batch: Batch,
    topology: Topology,
    shape: AttentionShape,
    config: PlannerConfig,
    rate: float = SLOW_LINKS,
) -> Plan:
    """Like `plan_batch`, with schedules for all of the nodes and these rates."""
    cut = Cut(config.block_size, config.head_groups or 1)
    solver = find_solver(config.solver)
    placed = place_batch(solver, batch, topology, shape, config.limits, cut=cut, seed=config.seed)
    pace = pace_of(topology, shape, rate)
    candidate = placed.schedule(config.divisions, pace, forward_only=config.forward_only)
    return candidate.lower(config.layout)
