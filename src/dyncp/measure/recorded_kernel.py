"""A kernel that notes what each of its calls takes, division by division."""

from collections.abc import Callable
from typing import Any

import torch

from dyncp.kernels import IndexArrays, Kernel, KernelCall
from dyncp.measure.timing import mark, seconds_between, wait_for
from dyncp.plan import AttentionShape


class RecordedKernel(Kernel):
    """Does what the kernel inside does, and times `attend` and `attend_backward` on the device."""

    def __init__(self, inner: Kernel, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._marks: list[tuple[Any, Any]] = []
        for name in Kernel.__annotations__:
            setattr(self, name, getattr(inner, name))

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        return self._inner.lower(call, arrays, backward=backward)

    def refuses(self, shape: AttentionShape) -> str:
        return self._inner.refuses(shape)

    def sequence_rows(self, lowered: Any, dim: int) -> Any:
        return self._inner.sequence_rows(lowered, dim)

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
