"""Transport for timing one rank alone: it counts bytes, and what arrives is noise.

`Null` fills received buffers with zeros, and GPUs multiply zeros faster than numbers: they draw
less power, so clocks stay up.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dyncp.transport import Null
from dyncp.transport.null import NullChannel


class Noise(Null):
    """Null, but received buffers hold normally distributed numbers of magnitude 1."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._noise: dict[torch.device, Tensor] = {}

    def open(self) -> "list[NullChannel]":
        return [NoiseChannel(self)]

    def bytes_like(self, buffer: Tensor) -> Tensor:
        """As bf16, whose bits are sensible numbers as fp32 and fp16 too."""
        held = self._noise.get(buffer.device)
        if held is None or held.nbytes < buffer.nbytes:
            numbers = torch.randn(-(-buffer.nbytes // 2), device=buffer.device)
            held = self._noise[buffer.device] = numbers.bfloat16().view(torch.uint8)
        return held[: buffer.nbytes]


class NoiseChannel(NullChannel):
    def __init__(self, transport: Noise) -> None:
        super().__init__(transport)
        self._noise = transport
        self._filled: dict[int, torch.cuda.Event] = {}  # by phase, on GPUs

    def launch(
        self, phase: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        super().launch(phase, sends, {})
        for buffer in receives.values():
            buffer.view(torch.uint8).copy_(self._noise.bytes_like(buffer))
            if buffer.is_cuda:  # messages have a stream of their own
                self._filled[phase] = torch.cuda.current_stream(buffer.device).record_event()

    def wait(self, phase: int) -> None:
        filled = self._filled.pop(phase, None)
        if filled is not None:
            torch.cuda.current_stream().wait_event(filled)
