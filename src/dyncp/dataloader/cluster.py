"""What plans are made for where the caller does not say: machines like this process's device."""

import torch

from dyncp.blocks import AttentionShape
from dyncp.cost import PROFILES, CostModel, Profile, profile_for_device, tell_profile
from dyncp.cost.profile import CPU
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.topology import Topology

CHANGE = (
    "pass topology=preset(name, machines, ranks), or cost=CostModel(profile, shape), for another"
)


def cluster_of(
    ranks: LoaderRanks, topology: Topology | None, cost: CostModel | None, shape: AttentionShape
) -> tuple[Topology, CostModel]:
    """Links and costs. What is given counts, and says what it can of the other; a topology that
    has no preset's name says nothing of costs. All ranks need the same: those that would plan for
    different profiles get BatchMismatch (see exchange.py)."""
    if cost is None:
        named = None if topology is None else PROFILES.get(topology.name)
        cost = CostModel(named or _profile_here(ranks), shape)
    if topology is None:
        found = ranks.topology()
        topology = cost.profile.topology(found.machines, found.ranks_per_machine)
    topology.check_ranks(ranks.num_ranks, "loader")
    return topology, cost


def _profile_here(ranks: LoaderRanks) -> Profile:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else CPU
    if not ranks.rank and ranks.num_ranks > 1:  # one rank has nothing to choose
        tell_profile(device, CHANGE)
    return profile_for_device(device)
