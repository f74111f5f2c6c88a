"""Communicator: a process group that carries messages between some ranks, in grouped calls."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.transport.transport import TransportError


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank sends and receives in grouped call `number` of a phase: positions of peers."""

    number: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def cut(
    position: int, count: int, sends: Iterable[int], receives: Iterable[int], classes: int
) -> list[Cut]:
    """The grouped calls of the rank at `position`, in order; those without messages are skipped.

    A message from position s to position r is of class d = (r − s) mod count. In a class every rank
    has at most one send (to d further on) and one receive (from d before), and both ends of a
    message give it the same class. Each grouped call takes a fixed range of classes, so both ends
    have a message in the call of the same number, whatever else they send. Four ranks, two classes
    per call; row s, column r, the call of each message:

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
    return [Cut(k, tuple(leaving.get(k, ())), tuple(coming.get(k, ()))) for k in numbers]


CALLS, PHASES = 2**16, 2**15  # gloo's tags have 31 bits


@dataclass(frozen=True, slots=True)
class Started:
    """Messages under way: from `sources` to this rank, from it to `targets`."""

    work: Any
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Communicator:
    """Carries messages "inside" or "between" machines, as its `name` says.

    `members` are ranks of the transport, `global_ranks` the same ones in torch's numbers, `rank` is
    this process's. A grouped call has at most `operations` sends and receives.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        members: Sequence[int],
        global_ranks: Sequence[int],
        rank: int,
        operations: int,
    ) -> None:
        self.name, self.group, self.members = name, group, tuple(members)
        self._global_ranks = tuple(global_ranks)
        self._positions = {member: i for i, member in enumerate(members)}
        self._rank = rank
        self._classes = operations // 2
        self.largest_call = 0  # sends and receives, so far

    def start(
        self,
        phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        call: int = 0,
    ) -> list[Started]:
        """Starts messages, one per peer rank each way, on the current stream. `call` is below
        `CALLS` and tells the messages of different calls apart."""
        parts = cut(
            self._positions[self._rank],
            len(self.members),
            [self._positions[peer] for peer in sends],
            [self._positions[peer] for peer in receives],
            self._classes,
        )
        tag = call * PHASES + phase % PHASES
        return [one for part in parts for one in self._call(phase, tag, part, sends, receives)]

    def _call(
        self,
        phase: int,
        tag: int,
        part: Cut,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
    ) -> list[Started]:
        sources = tuple(self.members[i] for i in part.receives)
        targets = tuple(self.members[i] for i in part.sends)
        coming = [self._op(dist.irecv, receives[peer], peer, tag) for peer in sources]
        leaving = [self._op(dist.isend, sends[peer], peer, tag) for peer in targets]
        ops = coming + leaving
        self.largest_call = max(self.largest_call, len(ops))
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self._rank} could not start its messages of phase {phase} {self.name} "
                f"machines, with {ranks_text({*sources, *targets})}: {error}"
            ) from error
        if len(works) < len(ops):  # NCCL: one work for the whole call
            return [Started(work, sources, targets) for work in works]
        ends = [((peer,), ()) for peer in sources] + [((), (peer,)) for peer in targets]
        return [Started(work, *end) for work, end in zip(works, ends, strict=True)]

    def _op(self, function: Any, tensor: Tensor, peer: int, tag: int) -> dist.P2POp:
        # Gloo tells calls and phases apart by their tags, NCCL by the order of messages.
        to = self._global_ranks[self._positions[peer]]
        return dist.P2POp(function, tensor, to, self.group, tag=tag)


def ranks_text(ranks: set[int] | Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5" """
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


SAME_CALLS = (
    "A rank is gone or slow, or made another attention call: all ranks have to make the same ones, "
    "with the same plan, mask and shape, in the same order"
)


class Starts(Protocol):
    """A transport that starts the messages of a phase, on all its communicators."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def start(
        self, phase: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], call: int
    ) -> Sequence[Started]: ...

    def finished(self) -> None:
        """Told when all messages of a call have left and arrived."""

    def arrival_stream(self, phase: int) -> "torch.cuda.Stream":
        """One that waits for nothing but the messages of a phase."""


class GroupedChannel:
    """`limit` bounds every wait of the host. None on GPUs: there only the current stream waits, and
    NCCL's watchdog bounds that. `call` stands for what all ranks have to call together."""

    def __init__(self, transport: Starts, limit: timedelta | None, call: int = 0) -> None:
        self.bytes_sent = 0
        self._transport, self._limit, self._call = transport, limit, call
        self._arriving: dict[int, list[Started]] = {}
        self._leaving: list[tuple[int, Started]] = []

    def launch(
        self,
        phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        arrived: Any = None,
    ) -> None:
        self.bytes_sent += sum(message.nbytes for message in sends.values())
        started = self._transport.start(phase, sends, receives, self._call)
        self._arriving[phase] = [one for one in started if one.sources]
        self._leaving += [(phase, one) for one in started if not one.sources]
        if arrived is not None:
            with torch.cuda.stream(self._transport.arrival_stream(phase)):
                self.wait(phase)
                arrived.record()

    def ready(self, _phase: int) -> bool:
        return True

    def wait(self, phase: int) -> None:
        for one in self._arriving.pop(phase):
            several = len(one.sources) > 1
            what = f"{'messages' if several else 'a message'} from {ranks_text(one.sources)}"
            self._complete(one.work, f"{what} in phase {phase}")

    def finish(self) -> None:
        """On a GPU the stream waits for all sends: the next call uses the same buffers."""
        for phase in list(self._arriving):
            self.wait(phase)
        for phase, one in self._leaving:
            self._complete(
                one.work, f"{ranks_text(one.targets)} to take its message of phase {phase}"
            )
        self._leaving.clear()
        self._transport.finished()

    def _complete(self, work: Any, what: str) -> None:
        rank, limit = self._transport.ranks[0], self._limit
        try:
            done = work.wait() if limit is None else work.wait(limit)
        except RuntimeError as error:
            raise TransportError(
                f"rank {rank} waited for {what} and got none: {error}. {SAME_CALLS}"
            ) from error
        if done is False and limit is not None:
            raise TransportError(
                f"rank {rank} waited {limit.total_seconds():g} s for {what} in vain. {SAME_CALLS}"
            )
