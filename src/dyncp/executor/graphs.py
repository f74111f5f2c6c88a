"""Runs a rank's call: messages, and between them segments of work, which are launched kernel by
kernel or replayed as CUDA graphs.

Kernels and everything that happens to rows run on the caller's stream, messages on one of their
own, so that they travel while divisions are computed. The host waits for neither.

The first run of a segment launches its work, which also compiles what was not compiled yet; the
second captures it, and from then on it is replayed. Captured work uses the executor's own memory
only. A graph belongs to one scale of scores, which is an argument of kernels.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dyncp.executor.order import GraphStream
from dyncp.kernels import Kernel
from dyncp.kernels.row_ops import Results
from dyncp.plan import Direction
from dyncp.transport import Channel, TransportError

logger = logging.getLogger(__name__)

CHOICES = ("auto", "serial", True, False)


@dataclass(frozen=True, slots=True)
class Graphs:
    """`wanted` says whether calls are laid out for graphs, which want fixed addresses; `beside`,
    whether independent work runs on parallel streams in them."""

    wanted: bool
    beside: bool = True

    @staticmethod
    def choose(choice: bool | str, device: torch.device, kernel: Kernel) -> "Graphs":
        """Kernels say with `capturable` that their calls may be captured."""
        if choice not in CHOICES:
            raise ValueError(f"graphs is {choice!r}; choose one of 'auto', 'serial', True, False")
        if device.type != "cuda":
            if choice is True:
                raise ValueError(
                    f"graphs=True needs a CUDA GPU; the device is {device}: leave it at 'auto'"
                )
            return Graphs(False)
        if choice is False:
            _log_once("graphs=False was asked for")
        elif not kernel.capturable:
            if choice is True:
                raise ValueError(
                    f"graphs=True, but calls of kernel {kernel.name!r} cannot be captured: leave "
                    "it at 'auto', or choose kernel triton or flash4"
                )
            _log_once(f"calls of kernel {kernel.name!r} cannot be captured")
            return Graphs(False)
        return Graphs(choice is not False, beside=choice != "serial")

    def replays(self, *, captured: bool) -> bool:
        """Whether the call that begins now may use graphs; `captured`: in one of the caller's."""
        if not self.wanted:
            return False
        if torch.is_anomaly_enabled():
            _log_once("autograd's anomaly mode is on")
            return False
        if captured:
            _log_once("the caller captures a graph of its own")
        return not captured


@cache
def _log_once(reason: str) -> None:
    logger.info("calls are launched kernel by kernel, not replayed as CUDA graphs: %s", reason)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What one attention call brings: the caller's tensors and the scale of scores."""

    given: Sequence[Tensor]  # q, k, v; backward also dout
    lse: Tensor | None  # backward
    out: Tensor | None  # backward
    results: Results
    scale: float
    replays: bool = False  # graphs may be used
    captured: bool = False  # by the caller, in a graph of its own


Work = Callable[[Frame], None]
# The stream of every launch in a graph, and launches on other streams that come before.
Assignment = Sequence[tuple[int, Sequence[int]]]
MOST_SCALES = 4  # scales of one plan's layers that have graphs: models have one or two


class Segment:
    """Work of one rank without communication points in it. `fixed` says that it uses nothing of the
    caller's, so that it can be captured. Launches of a graph run beside each other where `streams`
    says so."""

    def __init__(
        self, work: Sequence[Work], *, fixed: bool, streams: Assignment | None = None
    ) -> None:
        self._work, self._fixed, self._streams = tuple(work), fixed, streams
        self._graphs: dict[float, torch.cuda.CUDAGraph | None] = {}

    def run(self, frame: Frame) -> None:
        if not (frame.replays and self._fixed):
            self._launch(frame)
            return
        graph = self._graphs.get(frame.scale)
        if graph is not None:
            graph.replay()
        elif frame.scale in self._graphs:
            self._capture_and_replay(frame)
        else:
            if len(self._graphs) < MOST_SCALES:
                self._graphs[frame.scale] = None
            self._launch(frame)

    def _capture_and_replay(self, frame: Frame) -> None:
        try:
            graph = self._capture(frame)
        except RuntimeError as error:  # the work is right, and slower without
            logger.warning("a segment could not be captured as a CUDA graph: %s", error)
            self._fixed = False
            self._launch(frame)
        else:
            self._graphs[frame.scale] = graph
            graph.replay()

    def _launch(self, frame: Frame) -> None:
        for work in self._work:
            work(frame)

    def _capture(self, frame: Frame) -> "torch.cuda.CUDAGraph":
        """Capturing launches nothing, and waits for nothing: other threads may go on."""
        graph: Any = torch.cuda.CUDAGraph()
        streams = _capture_streams(torch.cuda.current_device())
        with _capturing, torch.cuda.stream(streams[0]):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launch_on(streams, frame)
            finally:
                graph.capture_end()
        return graph  # type: ignore[no-any-return]

    def _launch_on(self, streams: Sequence["torch.cuda.Stream"], frame: Frame) -> None:
        if self._streams is None:
            self._launch(frame)
            return
        others = [
            streams[number] for number in sorted({number for number, _ in self._streams} - {0})
        ]
        for stream in others:
            stream.wait_stream(streams[0])
        awaited = {launch for _, after in self._streams for launch in after}
        reached: dict[int, Any] = {}
        for launch, (work, (number, after)) in enumerate(
            zip(self._work, self._streams, strict=True)
        ):
            stream = streams[number]
            with torch.cuda.stream(stream):
                for earlier in after:
                    stream.wait_event(reached[earlier])
                work(frame)
                if launch in awaited:
                    reached[launch] = stream.record_event()
        for stream in others:
            streams[0].wait_stream(stream)


_capturing = Lock()  # executors of several threads share the streams
_streams: dict[int, list["torch.cuda.Stream"]] = {}


def _capture_streams(device: int) -> list["torch.cuda.Stream"]:
    """The caller's own may be the default one, on which nothing can be captured."""
    if device not in _streams:
        _streams[device] = [torch.cuda.Stream(device) for _ in GraphStream]  # type: ignore[no-untyped-call]
    return _streams[device]


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


class BoundStep(NamedTuple):
    """One thing to do, with the instruction that it belongs to. `waits` are phases whose messages
    other ranks of this process must have sent before."""

    run: Callable[[Frame, Channel], None]
    waits: tuple[int, ...]
    name: str


class Runner:
    """One rank's run of one program. `run` yields whenever it must wait for another rank of this
    process."""

    def __init__(
        self, steps: Sequence[BoundStep], direction: Direction, frame: Frame, channel: Channel
    ) -> None:
        self._steps, self._direction, self._frame = steps, direction, frame
        self._channel = channel
        self.num_finished = 0

    @property
    def last_finished(self) -> str:
        return self._steps[self.num_finished - 1].name if self.num_finished else "none"

    def run(self) -> Generator[None, None, None]:
        name = "the end"
        try:
            for step in self._steps:
                name = step.name
                for phase in step.waits:
                    while not self._channel.ready(phase):
                        yield
                step.run(self._frame, self._channel)
                self.num_finished += 1
            name = "the end"
            self._channel.finish()
        except TransportError as error:
            direction = self._direction.name.lower()
            where = f"{direction}, at {name}; last finished: {self.last_finished}"
            raise TransportError(f"{error} [{where}]") from error


def drive(runners: Sequence[Runner]) -> None:
    """Runs all ranks of this process, round robin, to their ends."""
    active = [(runner, runner.run()) for runner in runners]
    while active:
        before = [runner.num_finished for runner, _ in active]
        active = [(runner, steps) for runner, steps in active if _advance(steps)]
        if active and before == [runner.num_finished for runner, _ in active]:
            stuck = ", ".join(runner.last_finished for runner, _ in active)
            raise TransportError(
                f"all virtual ranks are waiting; last finished instructions: {stuck}"
            )


def _advance(steps: Generator[None, None, None]) -> bool:
    """Runs a rank until it must wait; False when it is done."""
    try:
        next(steps)
    except StopIteration:
        return False
    return True
