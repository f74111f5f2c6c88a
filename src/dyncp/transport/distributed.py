"""Transport `Distributed`: one rank per process, over gloo or NCCL. A `Communicator` is a process
group that sends messages between its ranks in grouped calls."""

import hashlib
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.transport import Buffers, TransportError

# Two hosts may have the same name, so on Linux the random id of the last boot is added.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# NCCL was seen to hang on grouped calls of more than 256 sends and receives: it then splits them
# itself, at different places on different ranks (pytorch/pytorch#174288).
GROUPED_OPERATIONS = 128
CALLS, PHASES = 2**16, 2**15  # a gloo tag holds both: 31 bits
SAME_CALLS = (
    "A rank has died or is slow, or made another attention call: all ranks must make the same "
    "calls (plan, mask and shape) in the same order"
)


class GroupedCall(NamedTuple):
    """One rank's share of grouped call `number` of a phase; peers are positions in the group."""

    number: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def cut(
    position: int, count: int, sends: Iterable[int], receives: Iterable[int], classes: int
) -> list[GroupedCall]:
    """Splits a phase into grouped calls: those of the rank at `position`, in order, without empty
    ones. A call contains `classes` classes of messages.

    A message from position s to position r has class d = (r − s) mod count. In each class a rank
    has at most one send (to position + d) and one receive (from position − d), and both ends of a
    message compute the same class. Since each grouped call covers a fixed range of classes, both
    ends put a message into the call with the same number, whatever else they send. Example: four
    ranks, two classes per call; entry [s, r] is the call of the message from s to r.

              0  1  2  3
            0 ·  0  0  1
            1 1  ·  0  0
            2 0  1  ·  0
            3 0  0  1  ·
    """
    leaving: dict[int, list[int]] = defaultdict(list)
    coming: dict[int, list[int]] = defaultdict(list)
    for distance, peer in sorted(((peer - position) % count, peer) for peer in sends):
        leaving[(distance - 1) // classes].append(peer)
    for distance, peer in sorted(((position - peer) % count, peer) for peer in receives):
        coming[(distance - 1) // classes].append(peer)
    numbers = sorted({*leaving, *coming})
    return [GroupedCall(k, tuple(leaving.get(k, ())), tuple(coming.get(k, ()))) for k in numbers]


class Started(NamedTuple):
    """Messages in flight, from `sources` to this rank and from this rank to `targets`."""

    work: Any
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass
class Communicator:
    """Sends messages "inside" or "between" nodes, depending on its `name`."""

    name: str
    group: Any
    members: Sequence[int]  # ranks of the transport
    global_ranks: Sequence[int]  # the same ranks as torch numbers them
    rank: int  # this process
    operations: int  # most sends and receives of a grouped call
    largest_call: int = 0  # sends and receives of the largest call so far
    _positions: dict[int, int] = field(init=False)  # rank → its index in `members`

    def __post_init__(self) -> None:
        self._positions = {member: i for i, member in enumerate(self.members)}

    def start(self, phase: int, sends: Buffers, receives: Buffers, call: int = 0) -> list[Started]:
        """Starts one message per peer rank and direction, on the current stream. `call` is below
        `CALLS` and distinguishes the messages of different attention calls."""
        parts = cut(
            self._positions[self.rank],
            len(self.members),
            [self._positions[peer] for peer in sends],
            [self._positions[peer] for peer in receives],
            self.operations // 2,
        )
        tag = call * PHASES + phase % PHASES
        return [one for part in parts for one in self._call(phase, tag, part, sends, receives)]

    def _call(
        self, phase: int, tag: int, part: GroupedCall, sends: Buffers, receives: Buffers
    ) -> list[Started]:
        sources = tuple(self.members[i] for i in part.receives)
        targets = tuple(self.members[i] for i in part.sends)
        ops = [self._op(dist.irecv, receives[peer], peer, tag) for peer in sources]
        ops += [self._op(dist.isend, sends[peer], peer, tag) for peer in targets]
        self.largest_call = max(self.largest_call, len(ops))
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} could not start its messages of phase {phase} {self.name} "
                f"nodes, with {ranks_text({*sources, *targets})}: {error}"
            ) from error
        if len(works) < len(ops):  # NCCL returns one work for the whole call
            return [Started(work, sources, targets) for work in works]
        ends = [((peer,), ()) for peer in sources] + [((), (peer,)) for peer in targets]
        return [Started(work, *end) for work, end in zip(works, ends, strict=True)]

    def _op(self, function: Any, tensor: Tensor, peer: int, tag: int) -> dist.P2POp:
        # Gloo matches messages by tag, NCCL by their order.
        to = self.global_ranks[self._positions[peer]]
        return dist.P2POp(function, tensor, to, self.group, tag=tag)


def ranks_text(ranks: set[int] | Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5" """
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


class GroupedChannel:
    """Channel of one attention call; `call` is the number that identifies it on all ranks.

    On CPUs the transport's timeout bounds every wait. On GPUs only the current stream waits, and
    NCCL's watchdog applies the timeout."""

    def __init__(self, transport: "Distributed", call: int = 0) -> None:
        self._transport, self._call = transport, call
        self._limit = None if transport.on_gpu else transport.timeout
        self._arriving: dict[int, list[Started]] = {}
        self._leaving: list[tuple[int, Started]] = []

    def launch(self, phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        started = self._transport.start(phase, sends, receives, self._call)
        self._arriving[phase] = [one for one in started if one.sources]
        self._leaving += [(phase, one) for one in started if not one.sources]
        if arrived is not None:
            stream = self._transport.arrival_stream(phase)
            with torch.cuda.stream(stream):
                self.wait(phase)
            arrived.record(stream)

    def ready(self, _phase: int) -> bool:
        return True

    def wait(self, phase: int) -> None:
        for one in self._arriving.pop(phase):
            several = len(one.sources) > 1
            what = f"{'messages' if several else 'a message'} from {ranks_text(one.sources)}"
            self._complete(one.work, f"{what} in phase {phase}")

    def finish(self) -> None:
        """On a GPU the stream waits for all sends, since the next call uses the same buffers."""
        for phase in list(self._arriving):
            self.wait(phase)
        for phase, one in self._leaving:
            what = f"{ranks_text(one.targets)} to receive its message of phase {phase}"
            self._complete(one.work, what)
        self._leaving.clear()
        self._transport.finished()

    def _complete(self, work: Any, what: str) -> None:
        rank, limit = self._transport.ranks[0], self._limit
        try:
            done = work.wait() if limit is None else work.wait(limit)
        except RuntimeError as error:
            raise TransportError(
                f"rank {rank} waited for {what}, which failed: {error}. {SAME_CALLS}"
            ) from error
        if done is False and limit is not None:
            waited = f"{limit.total_seconds():g} s for {what}"
            raise TransportError(f"rank {rank} waited {waited}, without success. {SAME_CALLS}")


def host_id() -> str:
    """Identifies this host. A container is a node of its own."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def settings_word(ranks_per_node: int | None, grouped_operations: int, node: str) -> bytes:
    """What a rank sends to the others: 16 bytes of settings, then a 16-byte hash of its node."""
    place = hashlib.sha256(node.encode()).digest()[:16]
    return struct.pack("<qq", ranks_per_node or 0, grouped_operations) + place


def read_nodes(words: Sequence[bytes]) -> tuple[int, ...]:
    """The node of every rank. Nodes are numbered in order of their first ranks."""
    odd = [rank for rank, word in enumerate(words) if word[:16] != words[0][:16]]
    if odd:
        raise ValueError(
            f"rank {odd[0]} has {_settings(words[odd[0]])}, rank 0 has {_settings(words[0])}: "
            "they must be equal on all ranks"
        )
    per_node, _ = struct.unpack("<qq", words[0][:16])
    if per_node:
        return tuple(rank // per_node for rank in range(len(words)))
    places = [word[16:] for word in words]
    number = {place: i for i, place in enumerate(dict.fromkeys(places))}
    return tuple(number[place] for place in places)


def _settings(word: bytes) -> str:
    per_node, operations = struct.unpack("<qq", word[:16])
    return f"ranks_per_node={per_node or None}, grouped_operations={operations}"


# Process groups of closed transports, which the next transport over the same ranks reuses; keys are
# (world, backend, ranks, timeout). Only groups of the current world are kept.
#
# Torch names a group by its ranks and by the number of groups. A group that is opened after another
# was destroyed can get the same name, and finds the old group's addresses in the store: ranks then
# connect to closed sockets. So groups live as long as the world. A group on which a call failed may
# still hold messages of that call; it stays open but is not reused.
_kept: dict[tuple[Any, ...], list[Any]] = defaultdict(list)


def _kept_groups(*key: Any) -> list[Any]:
    world = dist.group.WORLD
    if any(known[0] is not world for known in _kept):
        _kept.clear()
    return _kept[world, *key]


class Distributed:
    """Transport between the ranks of a process group or DeviceMesh (its dimension "cp" if it has
    several; None: the world).

    It opens its own groups over these ranks, so that its messages never mix with the model's. Plans
    are agreed on over gloo. Messages use gloo on CPUs and NCCL on GPUs, with one group inside each
    node and one between nodes, so that neither waits for the other. All ranks of the group must
    create the transport together, in the same order, with the same settings.

    By default, ranks on the same host form a node; `ranks_per_node` makes nodes of that many
    consecutive ranks instead. `grouped_operations` limits the sends and receives of one grouped
    call. `communicators` are listed in the order in which messages are started.
    """

    def __init__(
        self,
        group: Any = None,
        timeout: float = 600.0,
        device: torch.device | None = None,
        *,
        ranks_per_node: int | None = None,
        grouped_operations: int = GROUPED_OPERATIONS,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group "
                "first, or leave group=None to run on one rank"
            )
        members = _members_of(group)
        _check(len(members), ranks_per_node, grouped_operations)
        self.timeout = timedelta(seconds=timeout)
        self.num_ranks = len(members)
        self.ranks = (members.index(dist.get_rank()),)
        self.bytes_sent = 0
        self.global_ranks = tuple(members)
        self.grouped_operations = grouped_operations
        self.on_gpu = device is not None and device.type == "cuda"
        self._device = device if self.on_gpu else torch.device("cpu")
        self._arrival_streams: dict[int, torch.cuda.Stream] = {}
        self._opened: list[tuple[Any, tuple[Any, ...]]] = []  # (group, its key in `_kept`)
        self._unfinished = 0  # calls that have started and not (yet) succeeded
        self._group = self._open_group("gloo", members)
        word = settings_word(ranks_per_node, grouped_operations, host_id())
        self.nodes = read_nodes(
            self._every_word(word, "opening their groups", "create its transport")
        )
        self.communicators = self._open_communicators()

    def _open_communicators(self) -> tuple[Communicator, ...]:
        """Opens only communicators that some pair of ranks needs. The one between nodes is last."""
        own, everyone = self.nodes[self.ranks[0]], range(self.num_ranks)
        sizes = [self.nodes.count(node) for node in set(self.nodes)]
        opened = []
        # Ranks that are alone on their node take part, too: torch may create the group by splitting
        # the world's communicator, which needs all ranks.
        if max(sizes) > 1:
            inside = [rank for rank in everyone if self.nodes[rank] == own]
            opened.append(self._open_communicator("inside", inside))
        if len(sizes) > 1:
            opened.append(self._open_communicator("between", list(everyone)))
        return tuple(opened)

    def _open_communicator(self, name: str, members: list[int]) -> Communicator:
        global_ranks = [self.global_ranks[rank] for rank in members]
        if not self.on_gpu and len(members) == self.num_ranks:
            group = self._group
        else:
            group = self._open_group("nccl" if self.on_gpu else "gloo", global_ranks)
            # The first call on an NCCL group must involve all its ranks, and a phase may not.
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        rank, operations = self.ranks[0], self.grouped_operations
        return Communicator(name, group, members, global_ranks, rank, operations)

    def _open_group(self, backend: str, global_ranks: list[int]) -> Any:
        """A new or reused group. All its ranks call this together, in the same order."""
        key = (backend, tuple(global_ranks), self.timeout)
        options: dict[str, Any] = {"timeout": self.timeout, "use_local_synchronization": True}
        free = _kept_groups(*key)
        group = free.pop(0) if free else dist.new_group(global_ranks, backend=backend, **options)
        self._opened.append((group, key))
        return group

    def close(self) -> None:
        """Releases the groups, for reuse unless a call failed: its messages may still arrive."""
        for group, key in self._opened if dist.is_initialized() else ():
            _kept_groups(*(("failed",) if self._unfinished else key)).append(group)
        self._opened.clear()
        self.communicators, self._group = (), None

    def open(self, call: int = 0) -> list[GroupedChannel]:
        self._unfinished += 1
        return [GroupedChannel(self, call)]

    def agree(self, word: bytes) -> list[bytes]:
        return self._every_word(word, "agreeing on the plan", "call prepare")

    def finished(self) -> None:
        """Called when all messages of a call are sent and received."""
        self._unfinished -= 1

    def _every_word(self, word: bytes, doing: str, missed: str) -> list[bytes]:
        mine = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        words = self._all_gather(mine, self._group, doing, missed)
        return [bytes(other.tolist()) for other in words]

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        """Every rank's `[counts[rank], ...]` tensor. Any dtype: it is sent as bytes."""
        if self.num_ranks == 1:
            return [rows[: counts[0]]]
        self._check_alike(rows)
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        mine, everyone = padded.flatten().view(torch.uint8), self.communicators[-1].group
        parts = self._all_gather(mine, everyone, "gathering rows", "call gather")
        shaped = [part.view(rows.dtype).view(padded.shape) for part in parts]
        return [part[:count] for part, count in zip(shaped, counts, strict=True)]

    def sum(self, numbers: Tensor) -> Tensor:
        """Sizes and dtypes are not checked here: the preceding `gather` did."""
        total, everyone = numbers.clone(), self.communicators[-1].group
        self._collective(
            lambda: dist.all_reduce(total, group=everyone), "summing gradients", "run backward"
        )
        return total

    def _check_alike(self, rows: Tensor) -> None:
        """Raises on all ranks unless all gather rows of the same dtype and shape."""
        kind = f"{rows.dtype} {list(rows.shape[1:])}"
        word = hashlib.blake2b(kind.encode(), digest_size=16).digest()
        words = self._every_word(word, "gathering rows", "call gather")
        odd = [rank for rank, other in enumerate(words) if other != words[0]]
        if odd:
            raise ValueError(
                f"gather got rows of different dtypes or shapes on ranks 0 and {odd[0]} (rank "
                f"{self.ranks[0]} has {kind}); they must be the same on all ranks"
            )

    def _all_gather(self, mine: Tensor, group: Any, doing: str, missed: str) -> list[Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        self._collective(lambda: dist.all_gather(parts, mine, group=group), doing, missed)
        return parts

    def _collective(self, run: Callable[[], Any], doing: str, missed: str) -> None:
        self._unfinished += 1
        try:
            run()
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[0]} of {self.num_ranks} got no answer from all other ranks "
                f"while {doing}: a rank has died, or did not {missed} within "
                f"{self.timeout.total_seconds():g} s ({error})"
            ) from error
        self._unfinished -= 1

    def start(self, phase: int, sends: Buffers, receives: Buffers, call: int = 0) -> list[Started]:
        """Starts the messages of a phase on the current stream, first inside nodes, then between
        nodes. All ranks make their grouped calls in this order."""
        self.bytes_sent += sum(message.nbytes for message in sends.values())
        started: list[Started] = []
        for one in self.communicators:
            leaving, coming = (self._carried(one, messages) for messages in (sends, receives))
            started += one.start(phase, leaving, coming, call)
        return started

    def arrival_stream(self, phase: int) -> torch.cuda.Stream:
        """One stream per phase, so that other phases and later launches need not wait for it."""
        if phase not in self._arrival_streams:
            self._arrival_streams[phase] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._arrival_streams[phase]

    def _carried(self, communicator: Communicator, messages: Buffers) -> Buffers:
        """The messages that this communicator sends or receives."""
        if len(self.communicators) == 1:
            return messages
        node, inside = self.nodes[self.ranks[0]], communicator.name == "inside"
        chosen = [peer for peer in messages if (self.nodes[peer] == node) is inside]
        return {peer: messages[peer] for peer in chosen}


def _members_of(group: Any) -> list[int]:
    """Global ranks of a group that includes this process."""
    if hasattr(group, "get_group"):
        if group.ndim > 1 and "cp" not in (group.mesh_dim_names or ()):
            raise ValueError(
                f"the DeviceMesh has {group.ndim} dimensions, none of them named 'cp'; pass one of "
                "them, like mesh['ranks']"
            )
        group = group.get_group("cp") if group.ndim > 1 else group.get_group()
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not (group is None or outside or isinstance(group, dist.ProcessGroup)):
        raise ValueError(
            f"group is {type(group).__name__}; expected a ProcessGroup or a DeviceMesh"
        )
    members = [] if outside else dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in members:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group; only its ranks create the executor"
        )
    return members


def _check(num_ranks: int, ranks_per_node: int | None, grouped_operations: int) -> None:
    if ranks_per_node is not None and (ranks_per_node < 1 or num_ranks % ranks_per_node):
        raise ValueError(
            f"ranks_per_node is {ranks_per_node}, and the group has {num_ranks} ranks; give "
            "a divisor of that, or omit it so that hosts are the nodes"
        )
    if grouped_operations < 2:
        raise ValueError(
            f"grouped_operations is {grouped_operations}; at least 2 are needed: a send and a "
            "receive"
        )
