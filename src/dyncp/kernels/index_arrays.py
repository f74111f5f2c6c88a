"""IndexArrays: the index arrays of a plan, sent to the device in one copy."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: vector loads


class Index:
    """One array on its way to the device; `tensor` is there after `IndexArrays.send`."""

    __slots__ = ("array", "tensor")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.tensor: Tensor

    def __len__(self) -> int:
        return len(self.array)


class IndexArrays:
    """Collects the arrays of a plan while it is lowered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.whole: Tensor | None = None  # all of them, once they are sent
        self._indices: list[Index] = []

    def add(self, array: npt.NDArray[Any]) -> Index:
        index = Index(np.ascontiguousarray(array))
        self._indices.append(index)
        return index

    def send(self) -> "torch.cuda.Event | None":
        """One copy of all arrays, from pinned memory on a stream of its own where the device is a
        GPU; the event then says when they are there."""
        starts, total = [], 0
        for index in self._indices:
            starts.append(total)
            total += -(-index.array.nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = self.device.type == "cuda"
        host = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        for index, start in zip(self._indices, starts, strict=True):
            host.numpy()[start : start + index.array.nbytes] = index.array.view(np.uint8).reshape(
                -1
            )
        if not on_gpu:
            self._point_into(host, starts)
            return None
        stream = _side_stream(self.device)
        with torch.cuda.stream(stream):
            # A power of two: the next plan's arrays fit where an older plan's were.
            room = torch.empty(1 << (total - 1).bit_length(), dtype=torch.uint8, device=self.device)
            room[:total].copy_(host, non_blocking=True)
            self._point_into(room, starts)
            event: torch.cuda.Event = stream.record_event()
            return event

    def _point_into(self, whole: Tensor, starts: list[int]) -> None:
        self.whole = whole
        for index, start in zip(self._indices, starts, strict=True):
            dtype = torch.from_numpy(index.array[:0]).dtype
            flat = whole[start : start + index.array.nbytes].view(dtype)
            index.tensor = flat.view(index.array.shape)
        self._indices = []


_streams: dict[torch.device, "torch.cuda.Stream"] = {}


def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
