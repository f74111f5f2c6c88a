"""The ranks that make a loader together (`LoaderRanks`), the key-value store through which they
communicate, and the errors that one rank may cause on others.

`SharedStore` is a client of the process group's store; a single process has its own `Store`. Plans
and decisions (decision.py), heartbeats and failures (peers.py) go through it.
"""

import json
import math
import os
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dyncp.checks import parse_json, whole_number
from dyncp.dataloader import patience
from dyncp.topology import Topology

CHUNK_BYTES = 4 << 20  # a TCPStore resets the connection for values of more than 8 MiB


class StoreError(RuntimeError):
    """The store did not answer, or the connection to it was lost."""


class BatchMismatch(ValueError):  # noqa: N818 (a user's mistake: the ranks got different arguments)
    """Ranks disagree on options, batches, the content of a sample, or its masks."""


class PeerError(RuntimeError):
    """Another rank failed while preparing batches, left the loop, died, or is too late."""


class Store:
    """A key-value store of this process: small JSON values, and bytes of any size. Keys that
    several ranks write only use `add` and `first`."""

    def __init__(self) -> None:
        self._client: Any = dist.HashStore()  # type: ignore[attr-defined]

    def _call(self, name: str, *args: Any) -> Any:
        """Calls a method of torch's store."""
        return getattr(self._client, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value of a key, which must exist."""
        return _read_json(self._call("get", key))

    def first(self, key: str, value: Any) -> Any:
        """Sets the key unless another rank has set it; returns its value."""
        return _read_json(self._call("compare_set", key, "", json.dumps(value)))

    def has(self, key: str) -> bool:
        return bool(self._call("check", [key]))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter; returns the new sum."""
        return int(self._call("add", key, amount))

    def set_bytes(self, key: str, data: bytes) -> None:
        """Writes bytes in chunks, under `chunk_keys`."""
        for number, name in enumerate(chunk_keys(key, len(data))):
            self._call("set", name, data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])

    def get_bytes(self, key: str, size: int) -> bytes:
        return b"".join(bytes(self._call("get", name)) for name in chunk_keys(key, size))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._call("delete_key", key)

    def list_keys(self) -> list[str]:
        return list(self._call("list_keys"))

    def hurry(self) -> None:
        """Waits at most a few seconds for answers from now on, since only clean-up is left."""

    def close(self) -> None:
        """Closes the connection."""


def chunk_keys(key: str, size: int) -> list[str]:
    """The keys of a value of `size` bytes: key, key/1, ..."""
    more = range(1, -(-size // CHUNK_BYTES))
    return [key, *(f"{key}/{number}" for number in more)]


def _read_json(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise PeerError(f"the store has a text that cannot be read: {error}") from error


class SharedStore(Store):
    """A client of the process group's store, with its own connection and thread.

    Calls run in the thread so that they can time out: if the server hangs, most calls to a TCPStore
    never return, whatever its timeout."""

    def __init__(self, store: Any, prefix: str, rank: int, timeout: float) -> None:
        self._prefix, self._rank, self._timeout = prefix, rank, timeout
        self._broken: StoreError | None = None
        self._calls: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="dyncp-store", daemon=True
        )
        self._thread.start()

    def hurry(self) -> None:
        self._timeout = min(self._timeout, patience.HURRY)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(1.0)

    def _call(self, name: str, *args: Any) -> Any:
        if self._broken is not None:
            raise self._broken
        answer: Future[Any] = Future()
        self._calls.put((answer, name, args))
        try:
            return answer.result(self._timeout)
        except Exception as error:
            key = args[0] if args else "*"
            what = f"{name} of key '{self._prefix}/{key[0] if isinstance(key, list) else key}'"
            problem = f"failed at {what}: {str(error).partition(chr(10))[0]}"
            if isinstance(error, TimeoutError):
                problem = f"did not answer {what} within {self._timeout:g} s"
            self._broken = StoreError(f"rank {self._rank}: the store {problem}")
            raise self._broken from error

    def _run(self, store: Any) -> None:
        client: Any = None
        while (call := self._calls.get()) is not None:
            answer, name, args = call
            try:
                client = client or self._connect(store)
                answer.set_result(getattr(client, name)(*args))
            except Exception as error:
                answer.set_exception(error)

    def _connect(self, store: Any) -> PrefixStore:
        """A client with its own connection, if this kind of store has connections."""
        client = store.clone()
        client.set_timeout(timedelta(seconds=self._timeout))
        return PrefixStore(self._prefix, client)


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
    def of(group: Any = None, mesh: Any = None, virtual_ranks: int | None = None) -> "LoaderRanks":
        """The ranks of a ProcessGroup or one-dimensional DeviceMesh, of a mesh with a dimension
        "cp", or of the world; a single rank if torch.distributed is not initialised."""
        if sum(choice is not None for choice in (group, mesh, virtual_ranks)) > 1:
            raise ValueError("pass only one of group=, mesh= and virtual_ranks=")
        if virtual_ranks is not None:
            return LoaderRanks(None, whole_number("virtual_ranks", virtual_ranks, 1))
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
            f"mesh has dimensions {list(names)}; name one of them 'cp', or pass group="
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


def data_dimensions(mesh: Any) -> list[str]:
    """The dimensions of a mesh along which ranks have different tokens: dp... and "cp"."""
    names = mesh.mesh_dim_names or ()
    return [name for name in names if name == "cp" or name.startswith("dp")]
