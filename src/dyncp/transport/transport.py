"""The protocol of all transports; `Null`, one rank without its peers; `InProcess`, virtual ranks in
one process, driven by one thread.

On a GPU, virtual ranks copy messages on the stream that launches them, as soon as both ends are
there; waiting makes the current stream wait for the copy, never the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dyncp.checks import whole_number

Address = tuple[int, int, int]  # source, target, phase


Buffers = Mapping[int, Tensor]  # a byte tensor per peer rank


class TransportError(RuntimeError):
    """A peer did not answer in time, or is gone."""


class Channel(Protocol):
    """One rank's end of the transport, for one attention call in one direction.

    The phases of a call are launched in increasing order, each once, and waited for after that. On
    a GPU, "starts" and "returns when" are meant for the current stream: the host never waits.
    """

    bytes_sent: int

    def launch(self, phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        """Starts the messages of a phase: one contiguous byte tensor per peer rank, each way. On a
        GPU, `arrived` is an event to record when the receives are filled; such a phase is not
        waited for by `wait`."""

    def ready(self, phase: int) -> bool:
        """Whether `wait` can return without another rank of this process running first, and
        whether `arrived` was recorded."""

    def wait(self, phase: int) -> None:
        """Returns when the phase's receives are filled; raises TransportError after the timeout."""

    def finish(self) -> None:
        """Returns when all sends of the call have left."""


class Transport(Protocol):
    """Moves payloads between ranks. `ranks` are those that this process drives."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Of processes: the ranks of the world that they are; empty elsewhere."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process's ranks have sent so far."""

    def open(self, call: int = 0) -> Sequence[Channel]:
        """Channels for one call, one for each of this process's ranks. `call` (16 bits) stands for
        plan, mask, direction and shape, which are the same on all ranks."""

    def close(self) -> None:
        """Gives back what it holds; nothing can be sent after that."""

    def agree(self, word: bytes) -> list[bytes]:
        """Every rank's word (equally long), in rank order, within the timeout."""

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        """Every rank's `[counts[rank], ...]` tensor; `rows` has those of this process's ranks."""

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum of all processes' tensors, of equal shapes."""


class _OneProcess:
    """What transports that no other process takes part in share."""

    def __init__(self, num_ranks: int, ranks: tuple[int, ...]) -> None:
        self.num_ranks, self.ranks, self.bytes_sent = num_ranks, ranks, 0
        self.global_ranks: tuple[int, ...] = ()

    def close(self) -> None:
        """It holds nothing."""

    def agree(self, word: bytes) -> list[bytes]:
        return [word] * self.num_ranks

    def sum(self, numbers: Tensor) -> Tensor:
        return numbers


class Null(_OneProcess):
    """One rank without its peers: sends nothing, receives zeros, and counts bytes."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"null transport got rank={rank} of {num_ranks} ranks")
        super().__init__(num_ranks, (rank,))

    def open(self, call: int = 0) -> "list[NullChannel]":  # noqa: ARG002
        return [NullChannel(self)]

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        return [rows.new_zeros(count, *rows.shape[1:]) for count in counts]


class NullChannel:
    def __init__(self, transport: Null) -> None:
        self.bytes_sent = 0
        self._transport = transport

    def launch(self, _phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        sent = sum(message.nbytes for message in sends.values())
        self.bytes_sent += sent
        self._transport.bytes_sent += sent
        for buffer in receives.values():
            buffer.zero_()
        if arrived is not None:
            arrived.record()

    def ready(self, _phase: int) -> bool:
        return True

    def wait(self, _phase: int) -> None:
        pass

    def finish(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message that lies in its receiver's buffer; on a GPU, once `copied` is reached."""

    copied: "torch.cuda.Event | None"


@dataclass(slots=True)
class Awaited:
    """An event to record after `messages` more messages."""

    messages: int
    arrived: Any


@dataclass(frozen=True, slots=True)
class Mailbox:
    """What was sent, the buffers that messages go to, and who wants to know of a phase's last
    one: by rank and phase."""

    sent: dict[Address, Tensor | Delivered] = field(default_factory=dict)
    posted: dict[Address, Tensor] = field(default_factory=dict)
    awaited: dict[tuple[int, int], Awaited] = field(default_factory=dict)


class InProcess(_OneProcess):
    """`num_ranks` virtual ranks that pass messages through a mailbox."""

    def __init__(self, num_ranks: int = 1) -> None:
        num_ranks = whole_number("the number of virtual ranks", num_ranks, 1)
        super().__init__(num_ranks, tuple(range(num_ranks)))

    def open(self, call: int = 0) -> "list[InProcessChannel]":  # noqa: ARG002
        mailbox = Mailbox()  # of this call alone: one that failed leaves nothing behind
        return [InProcessChannel(self, mailbox, rank) for rank in self.ranks]

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        return list(rows.split_with_sizes(counts))


class InProcessChannel:
    def __init__(self, transport: InProcess, mailbox: Mailbox, rank: int) -> None:
        self.bytes_sent = 0
        self._transport, self._mailbox, self._rank = transport, mailbox, rank
        self._receives: dict[int, list[Address]] = {}

    def launch(self, phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        if receives:
            self._receives[phase] = [(peer, self._rank, phase) for peer in receives]
        if arrived is not None:
            self._mailbox.awaited[self._rank, phase] = Awaited(len(receives), arrived)
        for peer, buffer in receives.items():
            self._mailbox.posted[peer, self._rank, phase] = buffer
            self._deliver((peer, self._rank, phase))
        for peer, message in sends.items():
            key = (self._rank, peer, phase)
            assert key not in self._mailbox.sent, f"(source, target, phase) {key} was sent twice"
            self._mailbox.sent[key] = message
            self.bytes_sent += message.nbytes
            self._transport.bytes_sent += message.nbytes
            self._deliver(key)

    def _deliver(self, key: Address) -> None:
        source, target, phase = key
        message, buffer = self._mailbox.sent.get(key), self._mailbox.posted.get(key)
        if not isinstance(message, Tensor) or buffer is None:
            return
        if message.nbytes != buffer.nbytes:
            raise ValueError(
                f"rank {target} expects {buffer.nbytes} bytes from rank {source} in phase "
                f"{phase}, but {message.nbytes} were sent: the ranks hold different plans"
            )
        buffer.copy_(message, non_blocking=True)
        stream = torch.cuda.current_stream(buffer.device) if buffer.is_cuda else None
        self._mailbox.sent[key] = Delivered(stream.record_event() if stream else None)
        awaited = self._mailbox.awaited.get((target, phase))
        if awaited is not None:
            awaited.messages -= 1
            if not awaited.messages:
                awaited.arrived.record()

    def ready(self, phase: int) -> bool:
        sent = self._mailbox.sent
        return all(isinstance(sent.get(key), Delivered) for key in self._receives[phase])

    def wait(self, phase: int) -> None:
        for key in self._receives.pop(phase):
            delivered = self._mailbox.sent.pop(key)
            assert isinstance(delivered, Delivered), f"{key} was waited for before it was ready"
            if delivered.copied is not None:
                delivered.copied.wait()

    def finish(self) -> None:
        left = [p for p in self._receives if (self._rank, p) not in self._mailbox.awaited]
        assert not left, f"phases {left} were never waited for"
