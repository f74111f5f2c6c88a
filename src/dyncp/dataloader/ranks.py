"""Which ranks make a loader together (`LoaderRanks`), the key-value store that they talk through,
and the errors that one of them may cause on the others.

`SharedStore` is a client of the process group's store; a single process has a `Store` of its own.
Plans and decisions (decision.py), heartbeats and failures (peers.py) go through it.
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
from dyncp.topology import Topology

CHUNK_BYTES = 4 << 20  # values over 8 MiB reset the connection of a TCPStore
HURRY_SECONDS = 5.0


class StoreError(RuntimeError):
    """The store did not answer, or the connection to it is lost."""


class BatchMismatch(ValueError):  # noqa: N818 (a user's mistake: the ranks got different arguments)
    """Ranks disagree on options, on the content of a sample, or on its masks."""


class PeerError(RuntimeError):
    """Another rank failed while preparing batches, left the loop, or is gone."""


class Store:
    """Values by key, of this process alone: small JSON values, and bytes of any size. Keys with
    several writers only use `add` and `first`."""

    def __init__(self) -> None:
        self._client: Any = dist.HashStore()  # type: ignore[attr-defined]

    def _call(self, name: str, *args: Any) -> Any:
        """Calls a method of one of torch's stores."""
        return getattr(self._client, name)(*args)

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value of a key that exists."""
        return _read_json(self._call("get", key))

    def first(self, key: str, value: Any) -> Any:
        """Sets the key unless it is set; returns its value."""
        return _read_json(self._call("compare_set", key, "", json.dumps(value)))

    def has(self, key: str) -> bool:
        return bool(self._call("check", [key]))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter; returns the new sum."""
        return int(self._call("add", key, amount))

    def set_bytes(self, key: str, data: bytes) -> None:
        """Writes them in chunks: see `chunk_keys`."""
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
        """From now on, waits at most a few seconds for an answer: only clean-up is left."""

    def close(self) -> None:
        """Gives the connection back."""


def chunk_keys(key: str, size: int) -> list[str]:
    """Where so many bytes are written: key, key/1, ..."""
    more = range(1, -(-size // CHUNK_BYTES))
    return [key, *(f"{key}/{number}" for number in more)]


def _read_json(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise PeerError(f"the store has a text that cannot be read: {error}") from error


class SharedStore(Store):
    """A client of the process group's store, with its own connection and thread.

    The thread bounds every call: most calls to a TCPStore whose server hangs never return, whatever
    timeout is set."""

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
        self._timeout = min(self._timeout, HURRY_SECONDS)

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
        """A connection of its own, if the store's kind has connections."""
        client = store.clone()
        client.set_timeout(timedelta(seconds=self._timeout))
        return PrefixStore(self._prefix, client)


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
        """Nodes by torchrun's layout: the same number of consecutive ranks on each, or one
        node."""
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not self.group_ranks or not per_node:
            return Topology(1, self.num_ranks)
        nodes = [rank // per_node for rank in self.group_ranks]
        count = len(set(nodes))
        size = self.num_ranks // count
        in_order = nodes == [node for node in dict.fromkeys(nodes) for _ in range(size)]
        return Topology(count, size) if in_order else Topology(1, self.num_ranks)


def _of_mesh(mesh: Any) -> LoaderRanks:
    """Dimensions named dp... are replicas, "cp" runs plans; all others share the data, and "tp" the
    heads, too."""
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
    """Dimensions of a mesh along which ranks have different tokens: dp... and "cp"."""
    names = mesh.mesh_dim_names or ()
    return [name for name in names if name == "cp" or name.startswith("dp")]
