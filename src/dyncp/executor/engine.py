"""Engine: what all steps of an executor share."""

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
from dyncp.kernels import Kernel, RowOps
from dyncp.plan import AttentionShape, KernelStyle
from dyncp.transport import Transport

logger = logging.getLogger(__name__)

HEADROOM = 1.25  # of growth after the first, and of memory reserved for samples: batches differ


class Arena:
    """One buffer that every call takes anew. `used` are the bytes of the latest call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used = 0
        self._views: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
        self._allocate(0)

    def take(self, num_bytes: int, needed: int = 0) -> Tensor:
        """uint8[num_bytes], not cleared, until the next call; others will take up to `needed`."""
        self.used, needed = num_bytes, max(num_bytes, needed)
        if needed > self.capacity:
            self._replace(needed if self.capacity == 0 else int(needed * HEADROOM))
        return self._whole[:num_bytes]

    def reserve(self, num_bytes: int) -> None:
        """Makes the buffer at least so large."""
        if num_bytes > self.capacity:
            self._replace(num_bytes)

    def _replace(self, size: int) -> None:
        self._views.clear()
        self._allocate(0)  # frees the old buffer before the new one
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        with torch.inference_mode(False):  # calls in other modes use it, too
            self._whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.capacity = size

    def views(self, key: Any) -> dict[Any, Any]:
        """What calls keep for `key` as long as the buffer is the same."""
        return self._views.setdefault(key, {})


CLOSED = "the executor was closed: make another one to prepare and run plans"


class WrongResultsError(Exception):
    """A kernel is not right for some shape on this device."""


class Engine:
    """Kernel, transport and memory. `alternative` is for inputs that the kernel refuses; `check`
    compares the kernel with dense attention before its first use with a shape and raises
    WrongResultsError (None: it is trusted)."""

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
        # Held during a call: calls share memory and messages. Engines of one executor share it.
        self.lock: threading.Lock = alternative.lock if alternative else threading.Lock()
        self.graphs = Graphs.choose("auto", device, kernel) if graphs is None else graphs
        self.on_gpu = device.type == "cuda"
        self._refused: dict[AttentionShape, str] = {}  # reasons; empty ones: the kernel is right
        self._arenas: dict[int, Arena] = {}
        self._is_closed = False
        self._communication: torch.cuda.Stream | None = None

    def like(self, transport: Transport) -> "Engine":
        """The same on other ranks, without checks."""
        return Engine(self.kernel, transport, self.device, self.row_ops, self.graphs)

    def fitting(self, shape: AttentionShape) -> "Engine":
        """This engine, or the alternative one if the kernel was chosen automatically and does not
        support such inputs, or is wrong for them."""
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
        """Why the kernel is not used for a shape, after `check`; empty if it is."""
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
        """What the memory of calls depends on."""
        return style_of(self.kernel, fixed=self.graphs.wanted)

    def arena(self) -> Arena:
        """The memory for calls on the current stream: calls on one stream follow one another."""
        # As torch.cuda.current_stream(...).cuda_stream, without making a stream object.
        key = torch._C._cuda_getCurrentRawStream(self.device.index) if self.on_gpu else 0
        if key not in self._arenas:
            self.check_open()
            self._arenas[key] = Arena(self.device)
        return self._arenas[key]

    def check_open(self) -> None:
        if self._is_closed:
            raise ValueError(CLOSED)

    def close(self) -> None:
        """Gives back the memory of calls; later ones raise."""
        with self.lock:
            self._arenas.clear()
            self._is_closed = True

    def begin_call(self) -> None:
        """Takes the lock. If another thread's call is under way it waits, but processes could order
        the two differently, and take the messages of one for the other's: there it raises."""
        if self.lock.acquire(blocking=False):
            return
        if self.transport.num_ranks > len(self.transport.ranks):
            raise RuntimeError(
                "two threads call attention of one executor at the same time; ranks in processes "
                "need the same order of calls: call from one thread, or give every thread an "
                "executor of its own"
            )
        self.lock.acquire()

    def use_of_graphs(self) -> tuple[bool, bool]:
        """Whether the call that begins now may use graphs, and whether the caller captures it."""
        captured = self.on_gpu and torch.cuda.is_current_stream_capturing()
        return self.graphs.replays(captured=captured), captured

    def streams(self, *, has_messages: bool, captured: bool) -> Streams:
        """For one rank's calls, which the caller captures or not. One without messages runs on the
        current stream alone."""
        if not self.on_gpu or not has_messages:
            return HostStreams()
        if self._communication is None:
            stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            self._communication = stream
        return DeviceStreams(self._communication, external=not captured)


@cache
def _warn_of_other_kernel(name: str, reason: str) -> None:
    """Once per reason."""
    logger.warning("kernel %r takes over: %s", name, reason)
