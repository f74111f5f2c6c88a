"""Which ranks make a loader together (`LoaderRanks`), and whether they made the same one.

While a loader is made, its ranks compare their settings through the store (`Handshake`). The first
rank's settings count; every other rank compares its own with them. The loader is made when all
ranks have arrived and agree. A rank that differs, or cannot make its loader, says so, and the
others raise its message instead of waiting for it. Keys:

    terms            settings of the rank that came first
    here/2, came     process 2 has arrived, and where it runs; how many have
    all              all have, and where they run
    failed, left     the message of a rank that failed; the last one to leave deletes the keys
"""

import json
import logging
import math
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import torch.distributed as dist

from dyncp.dataloader.store import (
    BatchMismatch,
    PeerError,
    Store,
    StoreError,
    linger,
    read_json,
    wait_for,
)
from dyncp.topology import Topology

logger = logging.getLogger(__name__)


WARN_SECONDS = 5.0  # of waiting; then after twice as long, and so on
SHOWN = 4  # settings that differ, in an error
HOST = socket.gethostname()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Location = dict[str, Any]  # where a process runs: see `own_location`


@dataclass(frozen=True)
class LoaderRanks:
    """A *replica* is a set of processes that train on the same batches. Its `num_members` members
    share plans and take turns in making them. Of a plan for `num_ranks` ranks, this process takes
    the part of `rank` (None: all parts, for virtual ranks). Tensor-parallel peers have the same
    rank."""

    rank: int | None
    num_ranks: int
    member: int = 0
    num_members: int = 1
    replica: int = 0
    num_replicas: int = 1
    counts_targets: bool = True  # False for all but one of the members with this rank
    tensor_parallel: int = 1  # members that share the heads of a layer
    group_ranks: tuple[int, ...] = ()  # global ranks that run the plan together
    all_ranks: tuple[int, ...] = ()  # global ranks of all members of all replicas, in that order

    @property
    def process(self) -> int:
        """Index of this process among all members of all replicas."""
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
    def of(group: Any = None, mesh: Any = None, virtual_ranks: int | None = None) -> "LoaderRanks":
        """From a ProcessGroup or one-dimensional DeviceMesh, a mesh with a dimension "cp", or the
        world; a single rank if torch.distributed is not initialised."""
        if sum(choice is not None for choice in (group, mesh, virtual_ranks)) > 1:
            raise ValueError("pass only one of group=, mesh= and virtual_ranks=")
        if isinstance(group, LoaderRanks):  # benchmarks: one rank of a group that does not exist
            return group
        if virtual_ranks is not None:
            if virtual_ranks < 1:
                raise ValueError(f"virtual_ranks is {virtual_ranks}; must be at least 1")
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
                f"rank {dist.get_rank()} is not in the group of ranks {list(ranks)}; only its "
                "members can make a loader over it"
            )
        own = ranks.index(dist.get_rank())
        return LoaderRanks(own, len(ranks), own, len(ranks), group_ranks=ranks, all_ranks=ranks)

    def topology(self) -> Topology:
        """Machines by torchrun's layout: the same number of consecutive ranks on each, or one
        machine."""
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not self.group_ranks or not per_machine:
            return Topology(1, self.num_ranks)
        machines = [rank // per_machine for rank in self.group_ranks]
        count = len(set(machines))
        size = self.num_ranks // count
        in_order = machines == [machine for machine in dict.fromkeys(machines) for _ in range(size)]
        return Topology(count, size) if in_order else Topology(1, self.num_ranks)


def _of_mesh(mesh: Any) -> LoaderRanks:
    """Dimensions named dp... are replicas, "cp" runs plans; all others share the data, and "tp" the
    heads, too."""
    names = mesh.mesh_dim_names or ()
    if "cp" not in names:
        raise ValueError(
            f"mesh has dimensions {list(names)}; name one of them 'cp', or pass group="
        )
    sizes, own = dict(zip(names, mesh.shape, strict=True)), mesh.get_coordinate()
    at = dict(zip(names, own, strict=True))
    replicas = [name for name in data_dimensions(mesh) if name != "cp"]
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
        tensor_parallel=sizes.get("tp", 1),
        group_ranks=tuple(dist.get_process_group_ranks(mesh.get_group("cp"))),
        all_ranks=tuple(mesh.mesh.permute(order).flatten().tolist()),
    )


def data_dimensions(mesh: Any) -> list[str]:
    """Dimensions of a mesh along which ranks have different tokens: dp... and "cp"."""
    names = mesh.mesh_dim_names or ()
    return [name for name in names if name == "cp" or name.startswith("dp")]


def _flat(names: list[str], at: dict[str, int], sizes: dict[str, int]) -> int:
    """Row-major index of a coordinate over these dimensions."""
    index = 0
    for name in names:
        index = index * sizes[name] + at[name]
    return index


class Handshake:
    """A context around the making of a loader; `compare` completes it."""

    def __init__(self, store: Store, ranks: LoaderRanks) -> None:
        self._store, self._ranks = store, ranks
        self._warn_after = WARN_SECONDS

    def __enter__(self) -> "Handshake":
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if error is not None and not isinstance(error, PeerError | StoreError):
                mismatch = isinstance(error, BatchMismatch)
                text = str(error) if mismatch else f"{type(error).__name__}: {error}"
                self._say("failed", text=text, mismatch=mismatch)
            self._leave()
            if error is not None:
                linger(self._store, "left")
        except StoreError as second:
            logger.debug("leaving the handshake: %s", second)
        finally:
            self._store.close()

    def compare(self, settings: Mapping[str, str], timeout: float) -> list[Location]:
        """Waits at most `timeout` seconds for all ranks; BatchMismatch says which settings differ.
        Returns where the processes run."""
        first = self._say("terms", terms=dict(settings))
        self._check(first["terms"], first["rank"], settings)
        self._store.set(f"here/{self._ranks.process}", json.dumps(own_location()).encode())
        if self._store.add("came", 1) == self._ranks.num_processes:
            self._store.set("all", json.dumps(self._locations()).encode())
        start = monotonic()
        wait_for(self._store, "all", lambda: self._check_others(monotonic() - start, timeout))
        told = read_json(self._store.get("all"))
        return [dict(told["machines"][machine], pid=pid) for machine, pid in told["processes"]]

    def _locations(self) -> dict[str, Any]:
        """Of all processes; what those of one machine share is written once."""
        machines: list[dict[str, Any]] = []
        processes = []
        for process in range(self._ranks.num_processes):
            location = dict(read_json(self._store.get(f"here/{process}")))
            pid = location.pop("pid")
            if location not in machines:
                machines.append(location)
            processes.append((machines.index(location), pid))
        return {"machines": machines, "processes": processes}

    def _check_others(self, waited: float, timeout: float) -> None:
        if self._store.has("failed"):
            told = read_json(self._store.get("failed"))
            if told["mismatch"]:
                raise BatchMismatch(told["text"])
            raise PeerError(f"rank {told['rank']} could not make its loader: {told['text']}")
        if waited < min(self._warn_after, timeout):
            return
        self._warn_after *= 2
        processes = range(self._ranks.num_processes)
        missing = [self._ranks.name(p) for p in processes if not self._store.has(f"here/{p}")]
        text = f"rank {self._ranks.name()} has waited {waited:.0f} s for ranks {missing} to make "
        text += "this loader"
        if waited > timeout:
            raise PeerError(f"{text}; all ranks must make their loaders in the same order")
        logger.warning("%s", text)

    def _check(self, theirs: Mapping[str, str], rank: int, mine: Mapping[str, str]) -> None:
        names = [name for name in sorted({*theirs, *mine}) if theirs.get(name) != mine.get(name)]
        if not names:
            return
        told = "; ".join(
            f"{name} is "
            + ", ".join(
                f"{settings.get(name, 'nothing')} on rank {who}"
                for who, settings in sorted({rank: theirs, self._ranks.name(): mine}.items())
            )
            for name in names[:SHOWN]
        )
        raise BatchMismatch(
            f"ranks made different loaders: {told}; every rank needs the same arguments, samples "
            "and mask function"
        )

    def _say(self, key: str, **text: Any) -> dict[str, Any]:
        """Writes a key unless it is set; returns what was written first."""
        said = json.dumps({"rank": self._ranks.name(), **text})
        return read_json(self._store.compare_set(key, said.encode()))

    def _leave(self) -> None:
        if self._store.add("left", 1) == self._ranks.num_processes:
            here = [f"here/{process}" for process in range(self._ranks.num_processes)]
            for key in ("terms", "came", "all", "failed", *here, "left"):
                self._store.delete(key)


def own_location() -> Location:
    """`ids` is the boot and the namespace that process ids belong to: several machines, or
    containers with their own process ids, may have the same host name."""
    ids = HOST
    with suppress(OSError):  # not Linux
        ids = f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return {"host": HOST, "pid": os.getpid(), "ids": ids}
