"""Runs a rank's call: messages, and between them segments of work, which are launched kernel by
kernel or replayed as CUDA graphs.

Kernels and row work run on the caller's stream. Messages run on a separate stream, so that they
overlap with computation. The host waits for neither.

The first run of a segment launches its work and thereby compiles missing kernels, the second
captures it as a graph, and later runs replay the graph. Captured work uses only the executor's own
memory. Each scale of the scores needs its own graph, because the scale is a kernel argument.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
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
    """Whether graphs are used at all, and how.

    `wanted`: calls are laid out for graphs, which need fixed addresses. `parallel`: inside a graph,
    independent work runs on parallel streams."""

    wanted: bool
    parallel: bool = True

    @staticmethod
    def choose(choice: bool | str, device: torch.device, kernel: Kernel) -> "Graphs":
        """What the executor's option `graphs` means for this device and kernel."""
        if choice not in CHOICES:
            raise ValueError(f"graphs is {choice!r}; choose one of 'auto', 'serial', True, False")
        on_gpu, reason = device.type == "cuda", ""
        if not on_gpu:
            reason = f"graphs need a CUDA GPU, and the device is {device}"
        elif not kernel.capturable:
            reason = f"calls of kernel {kernel.name!r} cannot be captured"
        elif choice is False:
            reason = "graphs=False was requested"
        if reason and choice is True:
            raise ValueError(f"graphs=True, but {reason}; use graphs='auto' to run without graphs")
        if reason and on_gpu:
            _log_once(reason)
        return Graphs(wanted=not reason, parallel=choice != "serial")

    def replays(self, *, captured: bool) -> bool:
        """Whether the call that starts now may replay graphs. `captured`: the caller is capturing
        it in a graph of its own."""
        if not self.wanted:
            return False
        if torch.is_anomaly_enabled():
            _log_once("autograd's anomaly mode is on")
            return False
        if captured:
            _log_once("the caller is capturing a graph of its own")
        return not captured


@cache
def _log_once(reason: str) -> None:
    logger.info("calls are launched kernel by kernel, not replayed as CUDA graphs: %s", reason)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """The arguments of one attention call: the caller's tensors and the scale of the scores."""

    given: Sequence[Tensor]  # q, k, v; in backward also dout
    lse: Tensor | None  # only in backward
    out: Tensor | None  # only in backward
    results: Results
    scale: float
    replays: bool = False  # graphs may be replayed
    captured: bool = False  # the caller is capturing this call in a graph of its own


Work = Callable[[Frame], None]
# For every launch of a graph: its stream, and launches on other streams that must precede it.
Assignment = Sequence[tuple[int, Sequence[int]]]
MOST_SCALES = 4  # scales with graphs, per segment; models have one or two


class Segment:
    """Work of one rank between two communication points. `fixed` work uses none of the caller's
    tensors, so it can be captured. `streams` assigns the launches of the graph to parallel streams
    (None: to one stream)."""

    _capturing = Lock()  # shared, because captures of all threads use the same streams

    def __init__(
        self, work: Sequence[Work], *, fixed: bool, streams: Assignment | None = None
    ) -> None:
        self._work, self._fixed, self._streams = tuple(work), fixed, streams
        self._graphs: dict[float, torch.cuda.CUDAGraph | None] = {}

    def run(self, frame: Frame, _: Channel | None = None) -> None:
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
        except RuntimeError as error:  # without a graph, results are the same
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
        """Neither launches nor waits for anything, so other threads can continue meanwhile."""
        graph: Any = torch.cuda.CUDAGraph()
        with self._capturing:
            streams = _capture_streams(torch.cuda.current_device())
            with torch.cuda.stream(streams[0]):
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
        numbers = {number for number, _ in self._streams} - {0}
        others = [streams[number] for number in sorted(numbers)]
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


@cache
def _capture_streams(device: int) -> list["torch.cuda.Stream"]:
    """Streams for capturing. The caller's stream may be the default one, which cannot capture."""
    return [torch.cuda.Stream(device) for _ in GraphStream]  # type: ignore[no-untyped-call]


class HostEvent:
    """Stands for a CUDA event on the host, where a recorded event has always happened already."""

    def __init__(self) -> None:
        self._recorded = False

    def record(self) -> None:
        self._recorded = True

    def wait(self) -> None:
        assert self._recorded, "wait for an event that was not recorded"
        self._recorded = False


class HostStreams:
    """Streams of a rank whose work all runs in launch order: on the CPU, or on one CUDA stream."""

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
    """Streams and events of one rank, used by all its calls on the current stream.

    Events are `external` if the executor's graphs record them or wait for them while the other side
    is outside the graph. A graph of the caller contains the whole call, with ordinary events."""

    def __init__(self, communication: torch.cuda.Stream, *, external: bool = True) -> None:
        self._communication, self._external = communication, external
        self._compute = torch.cuda.current_stream(communication.device)
        self._communicating = _On(communication, self._compute)
        self._marks: dict[int, torch.cuda.Event] = {}
        self._arrivals: dict[int, torch.cuda.Event] = {}
        self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def marked(self, time: int) -> torch.cuda.Event:
        """Event: the compute stream has completed everything launched up to `time`."""
        return self._event(self._marks, time)

    def arrived(self, phase: int) -> torch.cuda.Event:
        """Event: the messages of a phase have arrived."""
        return self._event(self._arrivals, phase)

    def mark(self, time: int) -> None:
        self.marked(time).record(self._compute)

    def communicating(self) -> AbstractContextManager[Any]:
        """Makes the communication stream current."""
        return self._communicating

    def wait_for(self, ready: int) -> None:
        """Makes messages that are launched from now on wait for the mark at time `ready`."""
        self._communication.wait_event(self._marks[ready])

    def join(self) -> None:
        """Makes the compute stream wait for messages, so that the next call may reuse memory."""
        self._done.record(self._communication)
        self._compute.wait_event(self._done)

    def _event(self, events: dict[int, torch.cuda.Event], key: int) -> torch.cuda.Event:
        if key not in events:
            events[key] = torch.cuda.Event(external=self._external)  # type: ignore[no-untyped-call]
        return events[key]


class _On:
    """Like `torch.cuda.stream`, but faster: the stream to return to is already known."""

    def __init__(self, stream: torch.cuda.Stream, back: torch.cuda.Stream) -> None:
        self._stream, self._back = stream, back

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._back)


Streams = HostStreams | DeviceStreams


class BoundStep(NamedTuple):
    """One step of a rank's call. It may run once other ranks of this process have sent the messages
    of the phases `waits`. `name` appears in error messages."""

    run: Callable[[Frame, Channel], None]
    waits: tuple[int, ...]
    name: str


def run_rank(
    steps: Sequence[BoundStep], direction: Direction, frame: Frame, channel: Channel
) -> Iterator[BoundStep]:
    """Runs the steps of one rank. Yields a step as long as it must wait for another rank of this
    process."""
    current, finished = "the end", "none"
    try:
        for step in steps:
            current = step.name
            for phase in step.waits:
                while not channel.ready(phase):
                    yield step
            step.run(frame, channel)
            finished = current
        current = "the end"
        channel.finish()
    except TransportError as error:
        where = f"{direction.name.lower()}, at {current}; last finished: {finished}"
        raise TransportError(f"{error} [{where}]") from error


def drive(ranks: Sequence[Iterator[BoundStep]]) -> None:
    """Runs all ranks of this process, round robin, until they finish."""
    waiting: dict[Iterator[BoundStep], Any] = dict.fromkeys(ranks)
    while waiting:
        before = list(waiting.values())
        waiting = {rank: step for rank in waiting if (step := next(rank, None)) is not None}
        steps = list(waiting.values())
        if steps and steps == before:
            names = ", ".join(step.name for step in steps)
            raise TransportError(f"all virtual ranks are waiting, at {names}")
