"""LoaderRanks: which part of which plans this process takes, and whom it shares them with."""

import math
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dyncp.topology import Topology


@dataclass(frozen=True)
class LoaderRanks:
    """A *replica* is a set of processes that train on the same batches: its `num_members` members
    share plans, and take turns to make them. Of a plan for `num_ranks` ranks this process takes the
    part of `rank` (None: all parts, for virtual ranks). Tensor-parallel peers have the same rank.
    """

    rank: int | None
    num_ranks: int
    member: int = 0
    num_members: int = 1
    replica: int = 0
    num_replicas: int = 1
    counts_targets: bool = True  # False for all but one of the members with this rank
    group_ranks: tuple[int, ...] = ()  # global ranks that run the plan together
    all_ranks: tuple[int, ...] = ()  # global ranks of all members of all replicas, in that order

    @property
    def process(self) -> int:
        """Number of this process among all members of all replicas."""
        return self.replica * self.num_members + self.member

    def name(self, process: int | None = None) -> int:
        """Global rank of a process (default: this one), as messages name it."""
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
    def of(group: Any = None, mesh: Any = None, virtual_ranks: int | None = None) -> "LoaderRanks":
        """From a ProcessGroup or one-dimensional DeviceMesh, a mesh with dimension "cp", or the
        world; one rank where torch.distributed is not initialised."""
        if sum(choice is not None for choice in (group, mesh, virtual_ranks)) > 1:
            raise ValueError("give one of group=, mesh= and virtual_ranks=, not several")
        if isinstance(group, LoaderRanks):  # one rank of a group that is not there, to measure it
            return group
        if virtual_ranks is not None:
            if virtual_ranks < 1:
                raise ValueError(f"virtual_ranks is {virtual_ranks}; at least 1 is needed")
            return LoaderRanks(None, virtual_ranks)
        if mesh is not None and mesh.ndim > 1:
            return _of_mesh(mesh)
        group = mesh if group is None else group
        group = group.get_group() if hasattr(group, "get_group") else group
        if not dist.is_initialized():
            return LoaderRanks(0, 1)
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        if dist.get_rank() not in ranks:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group of ranks {list(ranks)}; only these "
                "make a loader over it"
            )
        own = ranks.index(dist.get_rank())
        return LoaderRanks(own, len(ranks), own, len(ranks), group_ranks=ranks, all_ranks=ranks)

    def topology(self) -> Topology:
        """Machines by torchrun's layout: equally many consecutive ranks on each, or one machine."""
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not self.group_ranks or not per_machine:
            return Topology(1, self.num_ranks)
        machines = [rank // per_machine for rank in self.group_ranks]
        count = len(set(machines))
        size = self.num_ranks // count
        in_order = machines == [machine for machine in dict.fromkeys(machines) for _ in range(size)]
        return Topology(count, size) if in_order else Topology(1, self.num_ranks)


def _of_mesh(mesh: Any) -> LoaderRanks:
    """Dimensions named dp... are replicas; "cp" runs plans; peers in all others share the data."""
    names = mesh.mesh_dim_names or ()
    if "cp" not in names:
        raise ValueError(
            f"mesh has dimensions {list(names)}; one named 'cp' is needed, or give group="
        )
    sizes, own = dict(zip(names, mesh.shape, strict=True)), mesh.get_coordinate()
    at = dict(zip(names, own, strict=True))
    replicas = [name for name in names if name.startswith("dp")]
    peers = [name for name in names if name not in (*replicas, "cp")]
    order = [names.index(name) for name in (*replicas, *peers, "cp")]
    return LoaderRanks(
        rank=at["cp"],
        num_ranks=sizes["cp"],
        member=_flat([*peers, "cp"], at, sizes),
        num_members=math.prod(sizes[name] for name in [*peers, "cp"]),
        replica=_flat(replicas, at, sizes),
        num_replicas=math.prod(sizes[name] for name in replicas),
        counts_targets=not any(at[name] for name in peers),
        group_ranks=tuple(dist.get_process_group_ranks(mesh.get_group("cp"))),
        all_ranks=tuple(mesh.mesh.permute(order).flatten().tolist()),
    )


def _flat(names: list[str], at: dict[str, int], sizes: dict[str, int]) -> int:
    """Row-major index of a coordinate over these dimensions."""
    index = 0
    for name in names:
        index = index * sizes[name] + at[name]
    return index
