"""Streams: what runs side by side on a GPU, and what waits for what.

Kernels, merges and unpacking run on the caller's stream. Packing and messages run on a stream of
their own, so that they travel while divisions are computed. The host waits for neither.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dyncp.kernels import IndexArrays

START = -1  # the time at which own rows are ready


class HostStreams:
    """Everything happens in the order of the program: on the CPU, or on one stream."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def mark(self, time: int) -> None:
        pass

    def launching(self, ready: int) -> AbstractContextManager[Any]:  # noqa: ARG002
        return self._nothing

    def packed(self) -> None:
        pass

    def before_slots_change(self) -> None:
        pass

    def join(self) -> None:
        pass


class DeviceStreams:
    """One rank's streams during one call."""

    def __init__(self, communication: torch.cuda.Stream) -> None:
        self._communication = communication
        self._compute = torch.cuda.current_stream(communication.device)
        self._marks: dict[int, torch.cuda.Event] = {}
        self._packed: torch.cuda.Event | None = None

    def mark(self, time: int) -> None:
        """What the compute stream was given so far is what a launch may wait for by `time`."""
        self._marks[time] = self._compute.record_event()

    def launching(self, ready: int) -> AbstractContextManager[Any]:
        """On the communication stream, as soon as the work up to `ready` is done."""
        self._communication.wait_event(self._marks[ready])
        return torch.cuda.stream(self._communication)

    def packed(self) -> None:
        self._packed = self._communication.record_event()

    def before_slots_change(self) -> None:
        """A slot may be refilled when what was in it is packed."""
        if self._packed is not None:
            self._compute.wait_event(self._packed)

    def join(self) -> None:
        """The next call may use the same memory."""
        self._compute.wait_stream(self._communication)


Streams = HostStreams | DeviceStreams


class Arrival:
    """Index arrays on their way to the device."""

    def __init__(self, arrays: IndexArrays) -> None:
        self._event = arrays.send()
        self._whole = arrays.whole
        self._users: set[int] = set()

    def wait(self) -> None:
        """Makes the current stream wait for them, and their memory outlive its use there."""
        if self._event is None or self._whole is None:
            return
        stream = torch.cuda.current_stream(self._whole.device)
        if stream.cuda_stream not in self._users:
            self._users.add(stream.cuda_stream)
            stream.wait_event(self._event)
            self._whole.record_stream(stream)
