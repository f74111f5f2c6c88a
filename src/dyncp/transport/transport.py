"""The protocol of all transports."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor


class TransportError(RuntimeError):
    """A peer did not answer in time, or is gone."""


class Channel(Protocol):
    """One rank's end of the transport, for one attention call in one direction.

    The phases of a call are launched in increasing order, each once, and waited for after that. On
    a GPU, "starts" and "returns when" are meant for the current stream: the host never waits.
    """

    bytes_sent: int

    def launch(
        self,
        phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        arrived: Any = None,
    ) -> None:
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
        """The sum of all processes' tensors, which are alike."""


class Null:
    def __init__(self, rank: int, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"null transport got rank={rank} of {num_ranks} ranks")
        self.num_ranks = num_ranks
        self.ranks = (rank,)
        self.global_ranks: tuple[int, ...] = ()
        self.bytes_sent = 0

    def close(self) -> None:
        """It holds nothing."""

    def open(self, call: int = 0) -> "list[NullChannel]":  # noqa: ARG002
        return [NullChannel(self)]

    def agree(self, word: bytes) -> list[bytes]:
        return [word] * self.num_ranks

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        return [rows.new_zeros(count, *rows.shape[1:]) for count in counts]

    def sum(self, numbers: Tensor) -> Tensor:
        return numbers


class NullChannel:
    def __init__(self, transport: Null) -> None:
        self.bytes_sent = 0
        self._transport = transport

    def launch(
        self,
        _phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        arrived: Any = None,
    ) -> None:
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
