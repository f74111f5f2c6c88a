"""Transports move messages between ranks. This file defines the protocol, and two transports that
need no other process: `Null` runs one rank without its peers, `InProcess` runs virtual ranks in one
thread. `Distributed`, between processes, is in `distributed.py`.

On a GPU, virtual ranks copy a message on the stream that launches it, as soon as the sender and the
receiver have both launched it. Waiting makes the current stream wait for the copy, never the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dyncp.checks import whole_number

Address = tuple[int, int, int]  # source, target, phase
Buffers = Mapping[int, Tensor]  # peer rank → byte tensor


class TransportError(RuntimeError):
    """A peer did not answer within the timeout, or has died."""


class Channel(Protocol):
    """One rank's end of the transport, for one attention call in one direction.

    Each phase of a call is launched once, in increasing order, and waited for afterwards. On a GPU,
    "starts" and "returns when" describe the current stream: the host never waits.
    """

    def launch(self, phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        """Starts the messages of a phase: one contiguous byte tensor per peer rank and direction.
        On a GPU, `arrived` is an event that is recorded when all receives are filled. A phase with
        such an event is never passed to `wait`."""

    def ready(self, phase: int) -> bool:
        """Whether `wait` can return (or `arrived` has been recorded) without first running another
        rank of this process."""

    def wait(self, phase: int) -> None:
        """Returns when the phase's receives are filled. Raises TransportError on timeout."""

    def finish(self) -> None:
        """Returns when all sends of the call are complete."""


class Transport(Protocol):
    """Moves messages between ranks. `ranks` are the ranks that this process runs."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks' numbers in torch's world; empty if they are not processes."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process's ranks have sent so far."""

    def open(self, call: int = 0) -> Sequence[Channel]:
        """One channel per rank of this process, for one call. `call` is a 16-bit hash of plan,
        mask, direction and shape, which are the same on all ranks."""

    def close(self) -> None:
        """Releases all resources. Nothing can be sent afterwards."""

    def agree(self, word: bytes) -> list[bytes]:
        """Every rank's word, in rank order. All words have the same length."""

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        """Every rank's `[counts[rank], ...]` tensor. `rows` holds the rows of this process."""

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum of all processes' tensors, which have the same shape."""


class _OneProcess:
    """Base of the transports that involve no other process."""

    def __init__(self, num_ranks: int, ranks: tuple[int, ...]) -> None:
        self.num_ranks, self.ranks, self.bytes_sent = num_ranks, ranks, 0
        self.global_ranks: tuple[int, ...] = ()

    def close(self) -> None:
        """There is nothing to release."""

    def agree(self, word: bytes) -> list[bytes]:
        return [word] * self.num_ranks

    def sum(self, numbers: Tensor) -> Tensor:
        return numbers


class Null(_OneProcess):
    """One rank without its peers. Sends nothing, receives zeros, and counts the bytes."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"the null transport got rank={rank} of {num_ranks} ranks")
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
    """What a rank receives in one phase."""

    empty: dict[int, Tensor]  # by peer: buffers whose message has not been copied yet
    arrived: Any  # event to record after the last copy, or None
    copied: list[torch.cuda.Event] = field(default_factory=list)  # on GPUs: one per copy


@dataclass(frozen=True, slots=True)
class Mailbox:
    """All messages of one call, shared by its channels."""

    sent: dict[Address, Tensor] = field(default_factory=dict)
    inboxes: dict[tuple[int, int], Inbox] = field(default_factory=dict)  # by (rank, phase)


class InProcess(_OneProcess):
    """`num_ranks` virtual ranks that exchange messages through a mailbox."""

    def __init__(self, num_ranks: int = 1) -> None:
        num_ranks = whole_number("the number of virtual ranks", num_ranks, 1)
        super().__init__(num_ranks, tuple(range(num_ranks)))

    def open(self, call: int = 0) -> "list[InProcessChannel]":  # noqa: ARG002
        mailbox = Mailbox()  # a new one per call: a failed call leaves no messages behind
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
        """Copies a message once both sender and receiver have launched it."""
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
        assert not inbox.empty, f"wait for phase {phase} before it was ready"
        for copied in inbox.copied:
            copied.wait()

    def finish(self) -> None:
        inboxes = self._mailbox.inboxes.items()
        left = [p for (r, p), inbox in inboxes if r == self._rank and inbox.arrived is None]
        assert not left, f"no wait for phases {left}"
