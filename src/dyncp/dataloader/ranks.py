"""Which ranks make a loader together (`LoaderRanks`), the key-value store that they talk through,
and whether they made the same loader (`Handshake`).

`SharedStore` is a client of the process group's store; `LocalStore` stands in for it in a single
process. Plans and decisions (decision.py), heartbeats and failures (peers.py) go through it.

While a loader is made, its ranks compare their settings: the first rank's count, and every other
rank compares its own with them. The loader is made when all ranks have arrived and agree. A rank
that differs, or cannot make its loader, says so, and the others raise its message instead of
waiting for it. Keys:

    terms            settings of the rank that came first
    here/2, came     process 2 has arrived, and where it runs; how many have
    all              all have, and where they run
    failed, left     the message of a rank that failed; the last one to leave deletes the keys"""

import json
import logging
import math
import os
import queue
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from dyncp.checks import whole_number
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

WARN_SECONDS = 5.0  # of waiting; then after twice as long, and so on
SHOWN = 4  # settings that differ, in an error
HOST = socket.gethostname()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Location = dict[str, Any]  # where a process runs: see `own_location`
CHUNK_BYTES = 4 << 20  # values over 8 MiB reset the connection of a TCPStore
FIRST_POLL, LONGEST_POLL = 0.5e-3, 20e-3  # seconds; an answer takes 0.1 ms on one node
HURRY_SECONDS = 5.0
LINGER_SECONDS = 3.0


class StoreError(RuntimeError):
    """The store did not answer, or the connection to it is lost."""


class BatchMismatch(ValueError):  # noqa: N818 (a user's mistake: the ranks got different arguments)
    """Ranks disagree on options, on the content of a sample, or on its masks."""


class PeerError(RuntimeError):
    """Another rank failed while preparing batches, left the loop, or is gone."""


class Store(ABC):
    """Small values by key. Keys with several writers only use `add` and `compare_set`."""

    @abstractmethod
    def _call(self, name: str, *args: Any) -> Any:
        """Calls a method of one of torch's stores."""

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        return bytes(self._call("get", key))

    def has(self, key: str) -> bool:
        return bool(self._call("check", [key]))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter; returns the new sum."""
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Sets the key unless it is set; returns its value."""
        return bytes(self._call("compare_set", key, "", value.decode()))

    def delete(self, key: str) -> None:
        self._call("delete_key", key)

    def list_keys(self) -> list[str]:
        return list(self._call("list_keys"))

    def hurry(self) -> None:  # noqa: B027
        """From now on, waits at most a few seconds for an answer: only clean-up is left."""

    def close(self) -> None:  # noqa: B027
        """Gives the connection back."""


class LocalStore(Store):
    """For a process that is alone."""

    def __init__(self) -> None:
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]

    def _call(self, name: str, *args: Any) -> Any:
        return getattr(self._store, name)(*args)


class SharedStore(Store):
    """A client of the process group's store, with its own connection and thread.

    The thread bounds every call: most calls to a TCPStore whose server hangs never return, whatever
    timeout is set."""

    def __init__(self, store: Any, prefix: str, rank: int, timeout: float) -> None:
        self._prefix, self._rank, self._timeout = prefix, rank, timeout
        self._broken: StoreError | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]] | None]
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
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((lambda client: getattr(client, name)(*args), answers))
        key = args[0] if args else "*"
        text = f"{self._prefix}/{key[0] if isinstance(key, list) else key}"
        what, error = f"{name} of key {text!r}", None
        try:
            result, error = answers.get(timeout=self._timeout)
            problem = f"failed at {what}: {str(error).partition(chr(10))[0]}" if error else ""
        except queue.Empty:
            problem = f"did not answer {what} within {self._timeout:g} s"
        if problem:
            self._broken = StoreError(f"rank {self._rank}: the store {problem}")
            raise self._broken from error
        return result

    def _run(self, store: Any) -> None:
        client: Any = None
        while (call := self._calls.get()) is not None:
            act, answers = call
            try:
                client = client or self._connect(store)
                answers.put((act(client), None))
            except Exception as error:
                answers.put((None, error))

    def _connect(self, store: Any) -> PrefixStore:
        """A connection of its own, if the store's kind has connections."""
        client = store.clone()
        client.set_timeout(timedelta(seconds=self._timeout))
        return PrefixStore(self._prefix, client)


def put_chunks(store: Store, key: str, data: bytes) -> list[str]:
    """Writes `data` under key, key/1, ... in chunks; returns the keys."""
    keys = chunk_keys(key, len(data))
    for number, name in enumerate(keys):
        store.set(name, data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
    return keys


def get_chunks(store: Store, key: str, size: int) -> bytes:
    return b"".join(store.get(name) for name in chunk_keys(key, size))


def chunk_keys(key: str, size: int) -> list[str]:
    more = range(1, -(-size // CHUNK_BYTES))
    return [key, *(f"{key}/{number}" for number in more)]


def linger(store: Store, key: str) -> None:
    """Waits briefly for the other ranks to delete a key: this process may host the store, and they
    would see a lost connection instead of the reason."""
    end = monotonic() + LINGER_SECONDS
    with suppress(StoreError):
        while monotonic() < end and store.has(key):
            sleep(LONGEST_POLL)


def wait_for(store: Store, key: str, still_waiting: Callable[[], None]) -> None:
    """Returns when the key exists. `still_waiting` is called now and then, and may raise.

    It polls instead of blocking in the store: a blocked call cannot be interrupted, and its timeout
    makes c10d log warnings."""
    pause, asked = FIRST_POLL, monotonic()
    while not store.has(key):
        sleep(pause)
        pause = min(2 * pause, LONGEST_POLL)
        if monotonic() - asked > 10 * LONGEST_POLL:
            try:
                still_waiting()
            except PeerError:
                if store.has(key):  # it was set just before the other rank left
                    return
                raise
            asked = monotonic()


def read_json(text: bytes) -> dict[str, Any]:
    """A dict that another rank wrote; PeerError if it cannot be read."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the store has a text that cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise PeerError(f"the store has {type(values).__name__} where a dict was expected")
    return values


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
        return [dict(told["nodes"][node], pid=pid) for node, pid in told["processes"]]

    def _locations(self) -> dict[str, Any]:
        """Of all processes; what those of one node share is written once."""
        nodes: list[dict[str, Any]] = []
        processes = []
        for process in range(self._ranks.num_processes):
            location = dict(read_json(self._store.get(f"here/{process}")))
            pid = location.pop("pid")
            if location not in nodes:
                nodes.append(location)
            processes.append((nodes.index(location), pid))
        return {"nodes": nodes, "processes": processes}

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
    """`ids` is the boot and the namespace that process ids belong to: several nodes, or
    containers with their own process ids, may have the same host name."""
    ids = HOST
    with suppress(OSError):  # not Linux
        ids = f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return {"host": HOST, "pid": os.getpid(), "ids": ids}
