"""A kernel that notes what each of its calls takes, division by division."""

from collections.abc import Callable
from typing import Any

import torch

from dyncp.measure.timing import mark, seconds_between, wait_for


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
        start = mark(self._device)
        function(*args, **options)
        self._marks.append((start, mark(self._device)))

    def take(self) -> list[float]:
        """Seconds of all calls since the last time, in order."""
        wait_for(self._device)
        marks, self._marks = self._marks, []
        return [seconds_between(start, end) for start, end in marks]
