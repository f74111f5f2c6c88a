"""Plans for several nodes, with a pace for the scheduler."""

from dataclasses import replace

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology
from dyncp.cost import CostModel, find_profile
from dyncp.placement import find_solver
from dyncp.planner import Task
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
    task = Task.of(batch, topology, shape, config, pace_of(topology, shape, rate).cost)
    return task.follow(task.place(find_solver(config.solver))).assemble(config.layout)
