"""Transport `in_process`: virtual ranks in one process, driven by one thread.

On a GPU, messages are copied on the stream that launches them, as soon as both ends are there;
waiting makes the current stream wait for the copy, never the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dyncp.checks import whole_number

Address = tuple[int, int, int]  # source, target, phase


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message that lies in its receiver's buffer; on a GPU, once `copied` is reached."""

    copied: "torch.cuda.Event | None"


@dataclass(slots=True)
class Awaited:
    """An event to record after so many more messages."""

    messages: int
    arrived: Any


@dataclass(frozen=True, slots=True)
class Mailbox:
    """What was sent, the buffers that messages go to, and who wants to know of a phase's last
    one: by rank and phase."""

    sent: dict[Address, Tensor | Delivered] = field(default_factory=dict)
    posted: dict[Address, Tensor] = field(default_factory=dict)
    awaited: dict[tuple[int, int], Awaited] = field(default_factory=dict)


class InProcess:
    """`num_ranks` virtual ranks that pass messages through a mailbox."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks = whole_number("the number of virtual ranks", num_ranks, 1)
        self.ranks = tuple(range(num_ranks))
        self.bytes_sent = 0
        self.global_ranks: tuple[int, ...] = ()

    def close(self) -> None:
        """It holds nothing."""

    def open(self, call: int = 0) -> "list[InProcessChannel]":  # noqa: ARG002
        mailbox = Mailbox()  # of this call alone: one that failed leaves nothing behind
        return [InProcessChannel(self, mailbox, rank) for rank in self.ranks]

    def agree(self, word: bytes) -> list[bytes]:
        return [word] * self.num_ranks

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        return list(rows.split_with_sizes(counts))

    def sum(self, numbers: Tensor) -> Tensor:
        return numbers

    def count(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes


class InProcessChannel:
    def __init__(self, transport: InProcess, mailbox: Mailbox, rank: int) -> None:
        self.bytes_sent = 0
        self._transport, self._mailbox, self._rank = transport, mailbox, rank
        self._receives: dict[int, list[Address]] = {}

    def launch(
        self,
        phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        arrived: Any = None,
    ) -> None:
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
            self._transport.count(message.nbytes)
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
        on_gpu = buffer.is_cuda
        self._mailbox.sent[key] = Delivered(
            torch.cuda.current_stream(buffer.device).record_event() if on_gpu else None
        )
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
