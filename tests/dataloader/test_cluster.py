"""What the loader plans for where nobody says."""

import pytest
import torch

from dyncp import AttentionShape, DCPDataLoader, masks
from dyncp.cost import CostModel, find_profile
from dyncp.dataloader import BatchMismatch
from dyncp.dataloader.planning import topology_and_cost
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.topology import Topology, preset
from processes import run_ranks

RANKS, SHAPE = LoaderRanks.of(virtual_ranks=4), AttentionShape()


def names(topology=None, cost=None):
    links, costs = topology_and_cost(RANKS, topology, cost, SHAPE)
    return links.name, costs.profile.name


def test_a_process_without_a_gpu_plans_for_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert names() == ("cpu_gloo", "cpu_gloo")


def test_a_process_with_a_gpu_plans_for_such_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert names() == ("h200", "h200")
    assert names(Topology(1, 4)) == ("custom", "h200")  # its links are its own


def test_what_is_given_counts_and_says_what_it_can_of_the_other():
    gb200 = CostModel(find_profile("gb200_nvl72"), SHAPE)
    assert names(preset("p4de", 1, 4)) == ("p4de", "p4de")
    assert names(cost=gb200) == ("gb200_nvl72", "gb200_nvl72")
    assert names(preset("p4de", 1, 4), gb200) == ("p4de", "gb200_nvl72")
    with pytest.raises(ValueError, match="the loader has 4 ranks"):
        names(Topology(1, 3))


def load_as(rank):
    samples = [{"input_ids": [i] * 9} for i in range(4)]
    topology = preset(("h200", "p4de")[rank], 1, 2)
    with pytest.raises(BatchMismatch, match="profile is h200 on rank 0, p4de on rank 1"):
        list(DCPDataLoader(samples, masks.causal, topology=topology))
    return True


@pytest.mark.xdist_group("processes")
def test_ranks_that_would_plan_for_different_profiles_are_told():
    assert run_ranks(load_as, 2) == [True, True]
