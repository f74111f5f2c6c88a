"""How much of a choice survives on clusters that are not quite as assumed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dyncp.planner.task import Candidate, Task
from dyncp.topology import Topology


def _slower_borders(topology: Topology) -> Topology:
    return replace(topology, inter=topology.inter.scaled(0.5, 1.0))


def _on(change: Callable[[Topology], Topology]) -> Callable[[Task], Task]:
    return lambda task: replace(task, topology=change(task.topology))


def _doubled_overheads(task: Task) -> Task:
    """Launches, calls, the host and latencies take twice as long."""
    profile = task.cost.profile
    slower = replace(
        profile,
        call_seconds=2 * profile.call_seconds,
        launch_seconds=2 * profile.launch_seconds,
        host_seconds=2 * profile.host_seconds,
        host_seconds_eager=2 * profile.host_seconds_eager,
    )
    cost = replace(task.cost, profile=slower)
    return replace(task, cost=cost, topology=task.topology.scaled(latency=2.0))


def _without_graphs(task: Task) -> Task:
    return replace(task, cost=replace(task.cost, graphs=False))


# Tasks with the same batch on other clusters, by what differs.
PERTURBATIONS: dict[str, Callable[[Task], Task]] = {
    "half the bandwidths": _on(lambda topology: topology.scaled(bandwidth=0.5)),
    "half the bandwidth between nodes": _on(_slower_borders),
    "NICs of a node pooled": _on(lambda topology: replace(topology, nics=1)),
    "overheads doubled": _doubled_overheads,
    "no CUDA graphs": _without_graphs,
}


def surviving(task: Task, ours: Candidate, others: Sequence[Candidate]) -> Mapping[str, float]:
    """The step of the fastest of `others` over ours, by perturbation. All keep their schedules."""
    ratios = {}
    for name, perturb in PERTURBATIONS.items():
        changed = perturb(task)
        best = min(changed.simulate(other).step_seconds for other in others)
        ratios[name] = best / changed.simulate(ours).step_seconds
    return ratios
