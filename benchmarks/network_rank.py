"""One rank of `benchmarks.network`: runs plans over gloo, where computing is waiting.

    python -m benchmarks.network_rank RANK NUM_RANKS RANKS_PER_MACHINE ADDRESS

Reads commands from its input, one JSON object per line, and writes an answer to each. Times are
those of the clock that all processes of this host share.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.executor import DCPExecutor, Step, attention
from dyncp.kernels import Kernel
from dyncp.measure.inputs import DTYPES
from dyncp.plan.codec import decode_part
from dyncp.transport import Distributed
from dyncp.transport.communicator import GroupedChannel

PORT = 29_500
TIMEOUT = 60.0  # seconds of any wait
SOON = 0.02  # seconds until all ranks start together
AT_ONCE = 5e-4  # seconds that waiting for messages takes that are there


class Device:
    """Computes beside its host: `ready` is when it has done all it was given so far and has all
    messages that it was told to wait for."""

    ready = 0.0

    def compute(self, seconds: float) -> None:
        self.ready += seconds
        sleep_until(self.ready)


class WaitingKernel(Kernel):
    """Every call takes the next of `seconds`, and computes nothing."""

    name = "waiting"

    def __init__(self, device: Device) -> None:
        self.seconds: list[float] = []
        self._device = device

    def lower(self, *_: Any, **__: Any) -> None:
        pass

    def attend(self, *_: Any) -> None:
        self._device.compute(self.seconds.pop(0))

    attend_backward = attend


class NoRowOps:
    """Rows stay where they are: messages have the right sizes, and any content."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


class TimedTransport(Distributed):
    """Notes when phases are launched, waited for and there: (what, phase, when). The device waits
    for those that are not there yet."""

    def __init__(self, ranks_per_machine: int, device: Device) -> None:
        super().__init__(timeout=TIMEOUT, ranks_per_machine=ranks_per_machine)
        self.noted: list[tuple[str, int, float]] = []
        self.device = device

    def note(self, what: str, phase: int) -> None:
        self.noted.append((what, phase, time.monotonic()))

    def open(self, call: int = 0) -> list[GroupedChannel]:
        self._unfinished += 1
        return [TimedChannel(self, self.timeout, call)]


class TimedChannel(GroupedChannel):
    _transport: TimedTransport

    def launch(
        self,
        phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        arrived: Any = None,
    ) -> None:
        self._transport.note("launch", phase)
        super().launch(phase, sends, receives, arrived)

    def wait(self, phase: int) -> None:
        self._transport.note("reach", phase)
        reached = time.monotonic()
        super().wait(phase)
        self._transport.note("arrive", phase)
        arrived = time.monotonic()
        if arrived > reached + AT_ONCE:
            self._transport.device.ready = max(self._transport.device.ready, arrived)


def sleep_until(when: float) -> None:
    left = when - time.monotonic()
    if left > 0:
        time.sleep(left)


class Rank:
    def __init__(self, rank: int, num_ranks: int, ranks_per_machine: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._device = Device()
        self._transport = TimedTransport(ranks_per_machine, self._device)
        self._kernel = WaitingKernel(self._device)
        self._executor = DCPExecutor(
            transport=self._transport, kernel=self._kernel, row_ops=NoRowOps()
        )

    def answer(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "send":
            return self.send(command["messages"], command["repeats"])
        return self.run(Path(command["part"]), command["seconds"], command["repeats"])

    def send(self, messages: Sequence[tuple[int, int, int]], repeats: int) -> list[float]:
        """Sends messages (source, target, bytes) in one phase, as the executor does. Returns when
        this rank had its own, after the start."""
        sends = {t: torch.zeros(n, dtype=torch.uint8) for s, t, n in messages if s == self.rank}
        receives = {s: torch.zeros(n, dtype=torch.uint8) for s, t, n in messages if t == self.rank}

        def exchange() -> None:
            channel = self._transport.open()[0]
            channel.launch(0, sends, receives)
            channel.wait(0)
            channel.finish()

        return [float(self._time(exchange)["seconds"]) for _ in range(repeats)]

    def run(
        self, path: Path, seconds: tuple[list[float], list[float]], repeats: int
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Forward and backward of a plan, `seconds` being those of its kernel calls."""
        part = decode_part(path.read_bytes())
        step = self._executor.prepare(part)
        shape = part.shape
        q, k, v = (
            torch.zeros(step.num_rows, heads, shape.head_dim, dtype=DTYPES[shape.dtype])
            for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
        )
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        return [self._both(step, inputs, seconds) for _ in range(repeats)]

    def _both(
        self, step: Step, inputs: tuple[Tensor, ...], seconds: tuple[list[float], list[float]]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        q, k, v = inputs
        out: list[Tensor] = []
        self._kernel.seconds = list(seconds[0])
        forward = self._time(lambda: out.append(attention(step, q, k, v)))
        dout = torch.zeros_like(out[0])
        self._kernel.seconds = list(seconds[1])
        backward = self._time(lambda: torch.autograd.grad(out[0], inputs, dout))
        return forward, backward

    def _time(self, call: Any) -> dict[str, Any]:
        start = self._common_start()
        self._transport.noted, self._device.ready = [], start
        sleep_until(start)
        call()
        seconds = time.monotonic() - start
        noted = [(what, phase, when - start) for what, phase, when in self._transport.noted]
        return {"seconds": seconds, "noted": noted}

    def _common_start(self) -> float:
        dist.barrier()
        start = torch.tensor(time.monotonic() + SOON, dtype=torch.float64)
        dist.broadcast(start, 0)
        return float(start)


def main() -> None:
    rank, num_ranks, ranks_per_machine = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{sys.argv[4]}:{PORT}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    runs = Rank(rank, num_ranks, ranks_per_machine)
    for line in sys.stdin:
        print(json.dumps(runs.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
