"""The cluster that the loader plans for if topology= and cost= are not given."""

import numpy as np
import pytest
import torch

from dyncp import AttentionShape, BatchMismatch, DCPExecutor, Topology, masks
from dyncp.blocks import Direction
from dyncp.cost import CostModel, find_profile
from dyncp.topology import preset
from loaders import make_loader
from processes import run_ranks

SAMPLES = [{"input_ids": [i] * 9} for i in range(4)]


def names(**options):
    with make_loader(SAMPLES, masks.causal, virtual_ranks=4, **options) as loader:
        return loader.topology.name, loader.cost.profile.name


def test_a_process_without_a_gpu_plans_for_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert names() == ("cpu_gloo", "cpu_gloo")


def test_a_process_with_a_gpu_plans_for_such_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert names() == ("h200", "h200")
    assert names(topology=Topology(1, 4)) == ("custom", "h200")  # its links are its own


def test_a_given_topology_or_cost_model_determines_the_other():
    p4de, gb200 = preset("p4de", 1, 4), CostModel(find_profile("gb200_nvl72"), AttentionShape())
    assert names(topology=p4de) == ("p4de", "p4de")
    assert names(cost=gb200) == ("gb200_nvl72", "gb200_nvl72")
    assert names(topology=p4de, cost=gb200) == ("p4de", "gb200_nvl72")
    with pytest.raises(ValueError, match="the loader has 4 ranks"):
        names(topology=Topology(1, 3))


def load_as(rank):
    topology = preset(("h200", "p4de")[rank], 1, 2)
    with pytest.raises(BatchMismatch, match="profile is h200 on rank 0, p4de on rank 1"):
        list(make_loader(SAMPLES, masks.causal, topology=topology))
    return True


def test_ranks_that_would_plan_for_different_profiles_are_told():
    assert run_ranks(load_as, 2) == [True, True]


def test_plans_are_priced_for_the_executor_that_will_run_them():
    def priced(**options):
        with make_loader(SAMPLES, masks.causal, virtual_ranks=4, **options) as loader:
            return loader.cost.graphs, loader.cost.deterministic

    assert priced() == (True, True)  # the defaults of a DCPExecutor on a GPU
    for deterministic in (False, True):
        executor = DCPExecutor(virtual_ranks=4, device="cpu", deterministic=deterministic)
        assert executor.priced == (False, deterministic)  # graphs need a GPU
        assert priced(executor=executor) == (False, deterministic)
    given = CostModel(find_profile("h200"), AttentionShape())
    assert priced(cost=given, executor=executor) == (True, False)


def test_deterministic_kernels_of_hopper_take_longer_backward():
    fast, same = (
        CostModel(find_profile("h200"), AttentionShape(), deterministic=d) for d in (False, True)
    )
    sides = np.array([4096])
    for direction, slower in ((Direction.FORWARD, 1.0), (Direction.BACKWARD, 1.5)):
        a, b = (
            cost.tile_seconds(sides**2, sides, sides, 32, direction)[0] for cost in (fast, same)
        )
        assert b >= slower * a
        assert (b > a) == (direction is Direction.BACKWARD)
