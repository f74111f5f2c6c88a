"""A kernel that notes what each of its calls takes, division by division."""

import time
from collections.abc import Callable
from typing import Any

import torch

from dyncp.measure.timing import wait_for


class RecordedKernel:
    """Does what the kernel inside does, whatever its protocol, and times `attend` and
    `attend_backward` on the device."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._marks: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def attend(self, *args: Any, **options: Any) -> None:
        self._record(self._inner.attend, args, options)

    def attend_backward(self, *args: Any, **options: Any) -> None:
        self._record(self._inner.attend_backward, args, options)

    def _record(self, function: Callable[..., None], args: Any, options: Any) -> None:
        start = self._mark()
        function(*args, **options)
        self._marks.append((start, self._mark()))

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> list[float]:
        """Seconds of all calls since the last time, in order."""
        wait_for(self._device)
        marks, self._marks = self._marks, []
        if self._device.type != "cuda":
            return [end - start for start, end in marks]
        return [1e-3 * start.elapsed_time(end) for start, end in marks]
