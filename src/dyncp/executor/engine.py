"""Engine: what all steps of an executor share."""

import logging
from functools import cache

import torch

from dyncp.executor.arena import Arena
from dyncp.executor.streams import DeviceStreams, HostStreams, Streams
from dyncp.kernels import Kernel, RowOps
from dyncp.plan import AttentionShape
from dyncp.transport import Transport

logger = logging.getLogger(__name__)


class Engine:
    """Kernel, transport and memory. `shape` is that of the latest call: plans that fit any shape
    are laid out for it in `prepare`, in the hope that the model stays the same."""

    def __init__(
        self, kernel: Kernel, transport: Transport, device: torch.device, row_ops: RowOps
    ) -> None:
        self.kernel, self.transport, self.device = kernel, transport, device
        self.alternative: Engine | None = None  # for inputs that the kernel refuses
        self.row_ops = row_ops
        self.on_gpu = device.type == "cuda"
        self.shape: AttentionShape | None = None
        self._arenas: dict[int, Arena] = {}
        self._communication: torch.cuda.Stream | None = None
        self._host_streams = HostStreams()

    def fitting(self, dtype: torch.dtype, dim: int) -> "Engine":
        """This engine, or the other one where its kernel refuses such inputs and the choice was
        left to the executor."""
        refuses = getattr(self.kernel, "refuses", None)
        reason = "" if refuses is None else refuses(dtype, dim)
        if not reason:
            return self
        if self.alternative is None:
            raise ValueError(reason)
        _warn_of_other_kernel(self.alternative.kernel.name, reason)
        return self.alternative

    def arena(self) -> Arena:
        """The memory for calls on the current stream: calls on one stream follow one another."""
        key = torch.cuda.current_stream(self.device).cuda_stream if self.on_gpu else 0
        if key not in self._arenas:
            self._arenas[key] = Arena(self.device)
        return self._arenas[key]

    def streams(self, *, has_messages: bool) -> Streams:
        """For one rank's call. One without messages runs on the current stream alone."""
        if not self.on_gpu or not has_messages:
            return self._host_streams
        if self._communication is None:
            stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            self._communication = stream
        return DeviceStreams(self._communication)


@cache
def _warn_of_other_kernel(name: str, reason: str) -> None:
    """Once per reason."""
    logger.warning("kernel %r takes over: %s", name, reason)
