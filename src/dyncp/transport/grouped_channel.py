"""GroupedChannel: one rank's messages of one call, over one or two communicators."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from dyncp.transport.communicator import Started, ranks_text
from dyncp.transport.transport import TransportError

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
