"""Streams: what runs side by side on a GPU, and what waits for what.

Kernels and everything that happens to rows run on the caller's stream, messages on one of their
own, so that they travel while divisions are computed. The host waits for neither.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dyncp.kernels import IndexArrays


class HostStreams:
    """Everything happens in the order of the program: on the CPU, or on one stream."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def mark(self, time: int) -> None:
        pass

    def launching(self, ready: int) -> AbstractContextManager[Any]:  # noqa: ARG002
        return self._nothing

    def join(self) -> None:
        pass


class DeviceStreams:
    """One rank's streams, the same in all its calls on the current stream."""

    def __init__(self, communication: torch.cuda.Stream) -> None:
        self._communication = communication
        self._compute = torch.cuda.current_stream(communication.device)
        self._launching = _On(communication, self._compute)
        self._marks: dict[int, torch.cuda.Event] = {}
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self, time: int) -> None:
        """What the compute stream was given so far is what a launch may wait for by `time`."""
        if time not in self._marks:
            self._marks[time] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._marks[time].record(self._compute)

    def launching(self, ready: int) -> AbstractContextManager[Any]:
        """On the communication stream, as soon as the work up to `ready` is done."""
        self._communication.wait_event(self._marks[ready])
        return self._launching

    def join(self) -> None:
        """The next call may use the same memory."""
        self._done.record(self._communication)
        self._compute.wait_event(self._done)


class _On:
    """`torch.cuda.stream` for two known streams: it need not ask for the current one."""

    def __init__(self, stream: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self._stream, self._back = stream, back

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._back)


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
