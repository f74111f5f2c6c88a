"""Transports move messages between ranks: the protocol of all; `Null`, one rank without its peers;
`InProcess`, virtual ranks in one process, driven by one thread. `distributed` has the one between
processes.

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
        self._transport = transport

    def launch(self, _phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        self._transport.bytes_sent += sum(message.nbytes for message in sends.values())
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
class Inbox:
    """What a rank receives in one phase: by peer, buffers that are still empty; the events of
    copies into the others (on GPUs); an event to record after the last copy, or None."""

    empty: dict[int, Tensor]
    arrived: Any
    copied: list[torch.cuda.Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The messages of one call that were sent, and the inboxes that they go to."""

    sent: dict[Address, Tensor] = field(default_factory=dict)
    inboxes: dict[tuple[int, int], Inbox] = field(default_factory=dict)  # by rank and phase


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
        self._transport, self._mailbox, self._rank = transport, mailbox, rank

    def launch(self, phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        mailbox, rank = self._mailbox, self._rank
        if receives:
            mailbox.inboxes[rank, phase] = Inbox(dict(receives), arrived)
        for peer in receives:
            self._deliver((peer, rank, phase))
        for peer, message in sends.items():
            address = (rank, peer, phase)
            assert address not in mailbox.sent, f"(source, target, phase) {address} was sent twice"
            mailbox.sent[address] = message
            self._transport.bytes_sent += message.nbytes
            self._deliver(address)

    def _deliver(self, address: Address) -> None:
        """Copies a message as soon as both ends are there."""
        source, target, phase = address
        message, inbox = self._mailbox.sent.get(address), self._mailbox.inboxes.get((target, phase))
        if message is None or inbox is None or source not in inbox.empty:
            return
        buffer = inbox.empty.pop(source)
        if message.nbytes != buffer.nbytes:
            raise ValueError(
                f"rank {target} expects {buffer.nbytes} bytes from rank {source} in phase "
                f"{phase}, but {message.nbytes} were sent: the ranks hold different plans"
            )
        buffer.copy_(message, non_blocking=True)
        if buffer.is_cuda:
            inbox.copied.append(torch.cuda.current_stream(buffer.device).record_event())
        if inbox.arrived is not None and not inbox.empty:
            inbox.arrived.record()

    def ready(self, phase: int) -> bool:
        return not self._mailbox.inboxes[self._rank, phase].empty

    def wait(self, phase: int) -> None:
        inbox = self._mailbox.inboxes.pop((self._rank, phase))
        assert not inbox.empty, f"phase {phase} was waited for before it was ready"
        for copied in inbox.copied:
            copied.wait()

    def finish(self) -> None:
        inboxes = self._mailbox.inboxes.items()
        left = [p for (r, p), inbox in inboxes if r == self._rank and inbox.arrived is None]
        assert not left, f"phases {left} were never waited for"
