"""The ranks that make a loader together."""

import math
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dyncp.checks import whole_number
from dyncp.topology import Topology, data_dimensions


@dataclass(frozen=True)
class LoaderRanks:
    """A *replica* is a set of processes that train on the same batches. Its `num_members` members
    share plans and take turns in making them. A plan is for `num_ranks` ranks; this process runs
    the part of `rank` (None: all parts, as virtual ranks). Tensor-parallel peers have the same
    `rank`."""

    rank: int | None
    num_ranks: int
    member: int = 0
    num_members: int = 1
    replica: int = 0
    num_replicas: int = 1
    counts_targets: bool = True  # True for one of the members with the same `rank`
    tensor_parallel: int = 1  # number of members that share the heads of a layer
    group_ranks: tuple[int, ...] = ()  # global ranks that run the plan together
    all_ranks: tuple[int, ...] = ()  # global ranks of all members, replica by replica

    @property
    def process(self) -> int:
        """Index of this process in `all_ranks`."""
        return self.replica * self.num_members + self.member

    def name(self, process: int | None = None) -> int:
        """Global rank of a process (default: this one), for messages."""
        number = self.process if process is None else process
        return self.all_ranks[number] if self.all_ranks else number

    @property
    def num_processes(self) -> int:
        return self.num_members * self.num_replicas

    @property
    def shared(self) -> bool:
        return self.num_processes > 1

    def plans(self, number: int) -> bool:
        """Whether this member plans the replica's batch `number`."""
        return number % self.num_members == self.member

    @staticmethod
    def of(group: Any = None, virtual_ranks: int | None = None) -> "LoaderRanks":
        """The ranks of a ProcessGroup or one-dimensional DeviceMesh, of a mesh with a dimension
        "cp", or of the world; a single rank if torch.distributed is not initialised."""
        if group is not None and virtual_ranks is not None:
            raise ValueError("pass only one of group= and virtual_ranks=")
        if virtual_ranks is not None:
            return LoaderRanks(None, whole_number("virtual_ranks", virtual_ranks, 1))
        if hasattr(group, "get_group"):
            if group.ndim > 1:
                return _of_mesh(group)
            group = group.get_group()
        if not dist.is_initialized():
            return LoaderRanks(0, 1)
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        if dist.get_rank() not in ranks:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group of ranks {list(ranks)}; only its "
                "members can make a loader over it"
            )
        own = ranks.index(dist.get_rank())
        return LoaderRanks(own, len(ranks), own, len(ranks), group_ranks=ranks, all_ranks=ranks)

    def topology(self) -> Topology:
        """Nodes in torchrun's layout: each has LOCAL_WORLD_SIZE consecutive global ranks. A single
        node if that is unknown, or if nodes would have different numbers of this plan's ranks."""
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not self.group_ranks or not per_node:
            return Topology(1, self.num_ranks)
        nodes = [rank // per_node for rank in self.group_ranks]
        count = len(set(nodes))
        size = self.num_ranks // count
        in_order = nodes == [node for node in dict.fromkeys(nodes) for _ in range(size)]
        return Topology(count, size) if in_order else Topology(1, self.num_ranks)


def _of_mesh(mesh: Any) -> LoaderRanks:
    """The ranks of a mesh: its dimensions named dp... are replicas, and the ranks along "cp" run
    plans. Ranks along all other dimensions get the same data; along "tp" they also share heads."""
    names = mesh.mesh_dim_names or ()
    if "cp" not in names:
        raise ValueError(
            f"mesh has dimensions {list(names)}; name one of them 'cp', or pass a process group"
        )
    replicas = [name for name in data_dimensions(mesh) if name != "cp"]
    peers = [name for name in names if name not in (*replicas, "cp")]
    sizes = dict(zip(names, mesh.shape, strict=True))
    at = dict(zip(names, mesh.get_coordinate(), strict=True))
    order = [names.index(name) for name in (*replicas, *peers, "cp")]
    all_ranks = mesh.mesh.permute(order).flatten().tolist()
    num_members = math.prod(sizes[name] for name in (*peers, "cp"))
    replica, member = divmod(all_ranks.index(dist.get_rank()), num_members)
    return LoaderRanks(
        rank=at["cp"],
        num_ranks=sizes["cp"],
        member=member,
        num_members=num_members,
        replica=replica,
        num_replicas=len(all_ranks) // num_members,
        counts_targets=not any(at[name] for name in peers),
        tensor_parallel=sizes.get("tp", 1),
        group_ranks=tuple(dist.get_process_group_ranks(mesh.get_group("cp"))),
        all_ranks=tuple(all_ranks),
    )
