"""Transport for timing one rank alone: it counts bytes, and what arrives is noise.

`Null` fills received buffers with zeros, and GPUs multiply zeros faster than numbers: they draw
less power, so clocks stay up.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dyncp.transport import Null
from dyncp.transport.transport import NullChannel


class Noise(Null):
    """Null, but received buffers hold normally distributed numbers of magnitude 1. The buffers of a
    phase, which lie behind each other, are filled by one copy."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._noise: dict[torch.device, Tensor] = {}
        self._fills: dict[int, tuple[Mapping[int, Tensor], Tensor, Tensor]] = {}
        self.filled: dict[int, torch.cuda.Event] = {}  # by phase, on GPUs

    def open(self, call: int = 0) -> "list[NullChannel]":  # noqa: ARG002
        return [NoiseChannel(self)]

    def fill(self, receives: Mapping[int, Tensor]) -> None:
        """The executor hands over the same mapping in every call: it is looked at once."""
        kept = self._fills.get(id(receives))
        if kept is None:
            buffers = list(receives.values())
            first, last = buffers[0], buffers[-1]
            span = last.data_ptr() + last.nbytes - first.data_ptr()
            whole = first.as_strided((span,), (1,))
            kept = self._fills[id(receives)] = receives, whole, self._bytes(span, first.device)
        _, target, source = kept
        target.copy_(source)

    def filled_event(self, phase: int, receives: Mapping[int, Tensor]) -> Any:
        """For `wait`; None on CPUs."""
        if phase not in self.filled and next(iter(receives.values())).is_cuda:
            self.filled[phase] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return self.filled.get(phase)

    def _bytes(self, count: int, device: torch.device) -> Tensor:
        """As bf16, whose bits are sensible numbers as fp32 and fp16 too."""
        held = self._noise.get(device)
        if held is None or held.nbytes < count:
            numbers = torch.randn(-(-count // 2), device=device)
            held = self._noise[device] = numbers.bfloat16().view(torch.uint8)
        return held[:count]


class NoiseChannel(NullChannel):
    def __init__(self, transport: Noise) -> None:
        super().__init__(transport)
        self._noise = transport

    def launch(
        self,
        phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        arrived: Any = None,
    ) -> None:
        super().launch(phase, sends, {})
        if not receives:
            return
        self._noise.fill(receives)
        if arrived is None:
            arrived = self._noise.filled_event(phase, receives)
        if arrived is not None:  # messages have a stream of their own
            arrived.record()

    def wait(self, phase: int) -> None:
        filled = self._noise.filled.get(phase)
        if filled is not None:
            filled.wait()
