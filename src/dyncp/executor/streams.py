"""Streams: what runs side by side on a GPU, and what waits for what.

Kernels and everything that happens to rows run on the caller's stream, messages on one of their
own, so that they travel while divisions are computed. The host waits for neither.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dyncp.kernels import IndexArrays


class HostEvent:
    """A point that work given in order has reached when it is asked for."""

    def __init__(self) -> None:
        self._recorded = False

    def record(self) -> None:
        self._recorded = True

    def wait(self) -> None:
        assert self._recorded, "waited for before it was recorded"
        self._recorded = False


class HostStreams:
    """Everything happens in the order in which it is given: on the CPU, or on one stream."""

    def __init__(self) -> None:
        self._nothing = nullcontext()
        self._arrivals: dict[int, HostEvent] = {}

    def marked(self, time: int) -> HostEvent:  # noqa: ARG002
        return HostEvent()

    def arrived(self, phase: int) -> HostEvent:
        return self._arrivals.setdefault(phase, HostEvent())

    def mark(self, time: int) -> None:
        pass

    def communicating(self) -> AbstractContextManager[Any]:
        return self._nothing

    def wait_for(self, ready: int) -> None:
        pass

    def join(self) -> None:
        pass


class DeviceStreams:
    """One rank's streams and events, the same in all its calls on the current stream. The
    executor's graphs wait for messages and mark what is ready by `external` events, which others
    record and wait for outside; a caller's graph has all of a call inside."""

    def __init__(self, communication: torch.cuda.Stream, *, external: bool = True) -> None:
        self._communication, self._external = communication, external
        self._compute = torch.cuda.current_stream(communication.device)
        self._communicating = _On(communication, self._compute)
        self._marks: dict[int, torch.cuda.Event] = {}
        self._arrivals: dict[int, torch.cuda.Event] = {}
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def marked(self, time: int) -> torch.cuda.Event:
        """Reached when the compute stream has done all that it was given by `time`."""
        return self._event(self._marks, time)

    def arrived(self, phase: int) -> torch.cuda.Event:
        """Reached when the messages of a phase are there."""
        return self._event(self._arrivals, phase)

    def mark(self, time: int) -> None:
        self.marked(time).record(self._compute)

    def communicating(self) -> AbstractContextManager[Any]:
        """On the communication stream."""
        return self._communicating

    def wait_for(self, ready: int) -> None:
        """Messages that are launched from now on wait for a mark."""
        self._communication.wait_event(self._marks[ready])

    def join(self) -> None:
        """The next call may use the same memory."""
        self._done.record(self._communication)
        self._compute.wait_event(self._done)

    def _event(self, events: dict[int, torch.cuda.Event], key: int) -> torch.cuda.Event:
        if key not in events:
            events[key] = torch.cuda.Event(external=self._external)  # type: ignore[no-untyped-call]
        return events[key]


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
