"""CUDA graphs: whether a call may use them, and segments, the work of a rank between two
communication points, which is launched kernel by kernel or replayed as one graph.

The first run of a segment launches its work, which also compiles what was not compiled yet; the
second captures it, and from then on it is replayed. Captured work uses the executor's own memory
only. A graph belongs to one scale of scores, which is an argument of kernels.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from dyncp.kernels import Kernel
from dyncp.kernels.row_ops import Results

logger = logging.getLogger(__name__)

CHOICES = ("auto", True, False)


@dataclass(frozen=True, slots=True)
class Graphs:
    """`wanted` says whether calls are laid out for graphs, which want fixed addresses; `beside`,
    whether what does not depend on each other runs side by side in them."""

    wanted: bool
    beside: bool = True

    @staticmethod
    def choose(choice: bool | str, device: torch.device, kernel: Kernel) -> "Graphs":
        """Kernels say with `capturable` that their calls may be captured."""
        if choice not in CHOICES:
            raise ValueError(f"graphs is {choice!r}; choose one of 'auto', True, False")
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
        return Graphs(choice is not False)

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


# Scales of one plan's layers that have graphs: models have one or two.
MOST_SCALES = 4


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


# A lane's number, and launches on other lanes that come before.
Placed = tuple[int, Sequence[int]]


class Segment:
    """Work of one rank without communication points in it. `fixed` says that it uses nothing of the
    caller's, so that it can be captured. Launches of a graph run beside each other where `lanes`
    says so; the first is lane 0."""

    def __init__(
        self, work: Sequence[Work], *, fixed: bool, lanes: Sequence[Placed] | None = None
    ) -> None:
        self._work, self._fixed = tuple(work), fixed
        self._lanes = lanes
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
        if self._lanes is None:
            self._launch(frame)
            return
        others = [streams[lane] for lane in sorted({lane for lane, _ in self._lanes} - {0})]
        for stream in others:
            stream.wait_stream(streams[0])
        awaited = {number for _, after in self._lanes for number in after}
        reached: dict[int, Any] = {}
        for number, (work, (lane, after)) in enumerate(zip(self._work, self._lanes, strict=True)):
            with torch.cuda.stream(streams[lane]):
                for earlier in after:
                    streams[lane].wait_event(reached[earlier])
                work(frame)
                if number in awaited:
                    reached[number] = streams[lane].record_event()
        for stream in others:
            streams[0].wait_stream(stream)


NUM_LANES = 4
_capturing = Lock()  # executors of several threads share the streams
_streams: dict[int, list["torch.cuda.Stream"]] = {}


def _capture_streams(device: int) -> list["torch.cuda.Stream"]:
    """One per lane. The caller's own may be the default one, on which nothing can be captured."""
    if device not in _streams:
        _streams[device] = [torch.cuda.Stream(device) for _ in range(NUM_LANES)]  # type: ignore[no-untyped-call]
    return _streams[device]
