"""Plans for several nodes, with a pace for the scheduler."""

from dataclasses import replace

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology
from dyncp.cost import CostModel
from dyncp.placement import find_solver
from dyncp.planner import Task
from dyncp.schedule import Pace
from kernels_only import KERNELS_ONLY

# Times the FLOP/s of an A100: slow links leave room for all phases, fast ones for few.
SLOW_LINKS, FAST_LINKS = 1e3, 1e-9


def pace_of(topology: Topology, shape: AttentionShape, rate: float = SLOW_LINKS) -> Pace:
    """Kernel calls cost nothing, so that the smallest batch is worth several phases."""
    profile = replace(
        KERNELS_ONLY,
        call_seconds=0.0,
        kernel_tile=1,
        attention_forward=KERNELS_ONLY.attention_forward * rate,
        attention_backward=KERNELS_ONLY.attention_backward * rate,
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
