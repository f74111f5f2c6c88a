"""Engine: the kernel, transport and memory that all steps of an executor share."""

import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dyncp.executor.graphs import DeviceStreams, Graphs, HostStreams, Streams
from dyncp.executor.kernel_calls import style_of
from dyncp.gradients import GradientCheck
from dyncp.kernels import Kernel, RowOps
from dyncp.plan import AttentionShape, KernelStyle
from dyncp.transport import Transport

logger = logging.getLogger(__name__)

HEADROOM = 1.25  # times what is needed, when memory grows again or is reserved: batches differ


class Arena:
    """One buffer that is reused by every call. `used` are the bytes of the latest call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used = 0
        self._views: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
        self._allocate(0)

    def take(self, num_bytes: int, needed: int = 0) -> Tensor:
        """uint8[num_bytes], uninitialised and valid until the next call. Later calls are known to
        take up to `needed` bytes."""
        self.used, needed = num_bytes, max(num_bytes, needed)
        if needed > self.capacity:
            self.reserve(needed if self.capacity == 0 else int(needed * HEADROOM))
        return self._whole[:num_bytes]

    def reserve(self, num_bytes: int) -> None:
        """Replaces the buffer if it is smaller than this."""
        if num_bytes > self.capacity:
            self._views.clear()
            self._allocate(0)  # frees the old buffer before the new one is allocated
            self._allocate(num_bytes)

    def _allocate(self, size: int) -> None:
        with torch.inference_mode(False):  # calls outside inference mode use it, too
            self._whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.capacity = size

    def views(self, key: Any) -> dict[Any, Any]:
        """A dict in which calls keep what belongs to `key`; emptied when the buffer is replaced."""
        return self._views.setdefault(key, {})


class WrongResultsError(Exception):
    """A kernel computes wrong results for some shape on this device."""


class Engine:
    """Kernel, transport and memory. `alternative` takes inputs that the kernel refuses. `check` is
    called before the kernel's first use with a shape: it compares the kernel with dense attention
    and raises WrongResultsError (None: no check)."""

    def __init__(
        self,
        kernel: Kernel,
        transport: Transport,
        device: torch.device,
        row_ops: RowOps,
        graphs: Graphs | None = None,
        *,
        alternative: "Engine | None" = None,
        check: "Callable[[Engine, AttentionShape], None] | None" = None,
    ) -> None:
        self.kernel, self.transport, self.device = kernel, transport, device
        self.row_ops, self.alternative, self.check = row_ops, alternative, check
        self.gradients: GradientCheck | None = None  # hears of every backward
        # Held during a call, since calls share memory and messages. Engines of one executor share
        # the lock.
        self.lock: threading.Lock = alternative.lock if alternative else threading.Lock()
        self.graphs = Graphs.choose("auto", device, kernel) if graphs is None else graphs
        self.on_gpu = device.type == "cuda"
        self._refused: dict[AttentionShape, str] = {}  # reason; empty if the kernel is used
        # The latest shape of calls by the shape of their plan: autocast may change the dtype.
        self.called: dict[AttentionShape, AttentionShape] = {}
        self._arenas: dict[int, Arena] = {}
        self._is_closed = False
        self._communication: torch.cuda.Stream | None = None

    def like(self, transport: Transport) -> "Engine":
        """An engine with the same kernel over other ranks, without checks."""
        return Engine(self.kernel, transport, self.device, self.row_ops, self.graphs)

    def fitting(self, shape: AttentionShape) -> "Engine":
        """This engine, or the alternative if this one's kernel refuses the shape or computes wrong
        results for it. Raises ValueError if there is no alternative."""
        reason = self._refused.get(shape)
        if reason is None:
            check = self.check
            reason = self.examine(shape, lambda: check(self, shape) if check else None)
        if not reason:
            return self
        if self.alternative is None:
            raise ValueError(reason)
        _warn_of_other_kernel(self.alternative.kernel.name, reason)
        return self.alternative.fitting(shape)

    def examine(self, shape: AttentionShape, check: Callable[[], None]) -> str:
        """Runs `check`. Returns why the kernel is not used for the shape; empty if it is used."""
        reason = self.kernel.refuses(shape)
        if not reason:
            try:
                check()
            except WrongResultsError as error:
                reason = f"{error}; it is not used. Please report this"
        self._refused[shape] = reason
        return reason

    @property
    def style(self) -> KernelStyle:
        """The properties of kernel and graphs that the memory of calls depends on."""
        return style_of(self.kernel, fixed=self.graphs.wanted)

    def arena(self) -> Arena:
        """The memory for calls on the current stream, which run one after another."""
        # Like torch.cuda.current_stream(...).cuda_stream, without creating a stream object.
        key = torch._C._cuda_getCurrentRawStream(self.device.index) if self.on_gpu else 0
        if key not in self._arenas:
            self.check_open()
            self._arenas[key] = Arena(self.device)
        return self._arenas[key]

    def check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the executor was closed: create a new one to prepare and run plans")

    def close(self) -> None:
        """Frees the memory of calls. Later calls raise."""
        with self.lock:
            self._arenas.clear()
            self._is_closed = True

    def begin_call(self) -> None:
        """Acquires the lock, after waiting for the call of another thread. With several processes
        it raises instead: ranks could order the two calls differently, and mix up their messages.
        """
        if self.lock.acquire(blocking=False):
            return
        if self.transport.num_ranks > len(self.transport.ranks):
            raise RuntimeError(
                "two threads call attention of one executor at the same time, but all ranks must "
                "make their calls in the same order: call from one thread, or create one executor "
                "per thread"
            )
        self.lock.acquire()

    def use_of_graphs(self) -> tuple[bool, bool]:
        """Whether the call that starts now may replay graphs, and whether the caller is capturing
        it in a graph of its own."""
        captured = self.on_gpu and torch.cuda.is_current_stream_capturing()
        return self.graphs.replays(captured=captured), captured

    def streams(self, *, has_messages: bool, captured: bool) -> Streams:
        """The streams of one rank's calls. A rank without messages uses only the current stream."""
        if not self.on_gpu or not has_messages:
            return HostStreams()
        if self._communication is None:
            stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            self._communication = stream
        return DeviceStreams(self._communication, external=not captured)


@cache
def _warn_of_other_kernel(name: str, reason: str) -> None:
    """Warns once per reason."""
    logger.warning("kernel %r takes over: %s", name, reason)
