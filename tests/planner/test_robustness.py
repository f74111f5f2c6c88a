"""What remains of a choice on clusters that are not quite as assumed."""

from dataclasses import replace

import pytest

from dyncp import AttentionShape, Batch, PlannerConfig, Topology, masks
from dyncp.cost import CostModel, find_profile
from dyncp.placement import with_degree
from dyncp.planner import PERTURBATIONS, Task, choose, surviving

SHAPE = AttentionShape(8, 2, 64)


@pytest.fixture(scope="module")
def task() -> Task:
    profile = find_profile("a100")
    batch = Batch.of([masks.causal(n) for n in (6000, 1500, 400)])
    topology = profile.topology(2, 4)
    return Task.of(batch, topology, SHAPE, PlannerConfig(), CostModel(profile, SHAPE))


def test_each_cluster_differs_as_it_is_called(task: Task) -> None:
    changed = {name: perturb(task) for name, perturb in PERTURBATIONS.items()}
    assert all(other.batch is task.batch for other in changed.values())
    now = task.topology
    half = changed["half the bandwidths"].topology
    assert half.intra.bandwidth == now.intra.bandwidth / 2
    assert half.inter.bandwidth == now.inter.bandwidth / 2
    borders = changed["half the bandwidth between nodes"].topology
    assert borders.intra == now.intra
    assert borders.inter.bandwidth == now.inter.bandwidth / 2
    pooled = changed["NICs of a node pooled"].topology
    assert pooled == replace(now, nics=1)  # the same bandwidth in all
    slow, was = changed["overheads doubled"], task.cost.profile
    assert slow.cost.profile.launch_seconds == 2 * was.launch_seconds
    assert slow.cost.profile.host_seconds == 2 * was.host_seconds
    assert slow.topology.inter.latency == 2 * now.inter.latency
    assert slow.topology.inter.bandwidth == now.inter.bandwidth
    assert changed["no CUDA graphs"].cost.host_seconds == was.host_seconds_eager


def test_ratios_are_those_of_the_same_plans_on_the_other_cluster(task: Task) -> None:
    ours = choose(task).candidate
    others = [task.follow(task.place(with_degree(name, 8))) for name in ("zigzag", "ring")]
    found = surviving(task, ours, others)
    assert found.keys() == PERTURBATIONS.keys()
    slow = PERTURBATIONS["half the bandwidths"](task)
    best = min(slow.simulate(other).step_seconds for other in others)
    assert found["half the bandwidths"] == best / slow.simulate(ours).step_seconds
    assert surviving(task, others[0], [others[0]]) == dict.fromkeys(PERTURBATIONS, 1.0)


def test_one_node_has_no_border_to_be_slower() -> None:
    profile = find_profile("h200")
    batch = Batch.of([masks.causal(3000)])
    task = Task.of(batch, Topology(1, 4), SHAPE, None, CostModel(profile, SHAPE))
    ours = choose(task).candidate
    other = task.follow(task.place(with_degree("zigzag", 4)))
    nominal = other.simulated.step_seconds / ours.simulated.step_seconds
    found = surviving(task, ours, [other])
    for name in ("half the bandwidth between nodes", "NICs of a node pooled"):
        assert found[name] == pytest.approx(nominal)
