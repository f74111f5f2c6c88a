"""The ranks of `benchmarks.network`: one process per network namespace, which executes commands.

    python -m benchmarks.network_ranks RANK NUM_RANKS RANKS_PER_MACHINE ADDRESS

`Ranks` starts the processes. Each runs plans over gloo and waits instead of computing. It reads
commands from stdin, one JSON object per line, and writes an answer to each. All processes use the
host's clock.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.network_links import Namespaces
from dyncp.calibrate.calls import DTYPES
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.kernels import Kernel
from dyncp.plan.codec import decode_part
from dyncp.transport.distributed import Distributed, GroupedChannel

ENDING = 5.0  # seconds that killed processes get to end
PORT = 29_500
TIMEOUT = 60.0  # timeout of every wait, in seconds
SOON = 0.02  # seconds until all ranks start together
AT_ONCE = 5e-4  # seconds that it takes to wait for messages that have arrived


class RankFailedError(Exception):
    pass


class Ranks:
    """`with Ranks(namespaces) as ranks:` starts the processes, and kills them at the end."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces, self._processes = namespaces, list[subprocess.Popen[bytes]]()

    def __enter__(self) -> "Ranks":
        try:
            for rank in range(self._namespaces.num_ranks):
                self._processes.append(self._start(rank))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(ENDING)
        self._processes.clear()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        net = self._namespaces
        sizes = map(str, (rank, net.num_ranks, net.ranks_per_node))
        module = [sys.executable, "-m", "benchmarks.network_ranks", *sizes, net.address(0)]
        return subprocess.Popen(
            ["ip", "netns", "exec", net.name(rank), *module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "between", "OMP_NUM_THREADS": "1"},
        )

    def ask(self, commands: Sequence[Mapping[str, Any]], timeout: float = 120.0) -> list[Any]:
        """Sends every rank its command and returns their answers."""
        for process, command in zip(self._processes, commands, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
        return [json.loads(line) for line in self._lines(time.monotonic() + timeout)]

    def _lines(self, deadline: float) -> list[bytes]:
        """Reads one line from every rank; raises if a rank ends or takes too long."""
        found = [b""] * len(self._processes)
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    missing = [r for r, line in enumerate(found) if not line.endswith(b"\n")]
                    raise RankFailedError(f"ranks {missing} gave no answer in time")
                for key, _ in ready:
                    some = os.read(key.fd, 1 << 20)
                    if not some:
                        raise RankFailedError(f"rank {key.data} ended; its error is above")
                    found[key.data] += some
                    if some.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return found


class Device:
    """A device that computes concurrently with its host. `ready` is the time when it has finished
    all work so far and has all messages that it waits for."""

    ready = 0.0

    def compute(self, seconds: float) -> None:
        self.ready += seconds
        sleep_until(self.ready)


class WaitingKernel(Kernel):
    """Computes nothing; each call takes the next of `seconds`."""

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
    """Does not move rows: messages have the right sizes and arbitrary content."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: lambda *_: None  # what makes a launch, and the launch


class DeviceTransport(Distributed):
    """Tells the device when the messages that it waits for have arrived."""

    def __init__(self, ranks_per_node: int, device: Device) -> None:
        super().__init__(timeout=TIMEOUT, ranks_per_node=ranks_per_node)
        self.device = device

    def open(self, call: int = 0) -> list[GroupedChannel]:
        self._unfinished += 1
        return [DeviceChannel(self, call)]


class DeviceChannel(GroupedChannel):
    _transport: DeviceTransport

    def wait(self, phase: int) -> None:
        reached = time.monotonic()
        super().wait(phase)
        arrived = time.monotonic()
        if arrived > reached + AT_ONCE:
            self._transport.device.ready = max(self._transport.device.ready, arrived)


def sleep_until(when: float) -> None:
    left = when - time.monotonic()
    if left > 0:
        time.sleep(left)


class Rank:
    def __init__(self, rank: int, num_ranks: int, ranks_per_node: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._device = Device()
        self._transport = DeviceTransport(ranks_per_node, self._device)
        self._kernel = WaitingKernel(self._device)
        self._executor = DCPExecutor(
            transport=self._transport, kernel=self._kernel, row_ops=NoRowOps()
        )

    def answer(self, command: Mapping[str, Any]) -> Any:
        if command["do"] == "send":
            return self.send(command["messages"], command["repeats"])
        return self.run(Path(command["part"]), command["seconds"], command["repeats"])

    def send(self, messages: Sequence[tuple[int, int, int]], repeats: int) -> list[float]:
        """Sends messages (source, target, bytes) in one phase, as the executor does. Returns the
        seconds from the start until this rank has its own messages."""
        sends = {t: torch.zeros(n, dtype=torch.uint8) for s, t, n in messages if s == self.rank}
        receives = {s: torch.zeros(n, dtype=torch.uint8) for s, t, n in messages if t == self.rank}

        def exchange() -> None:
            channel = self._transport.open()[0]
            channel.launch(0, sends, receives)
            channel.wait(0)
            channel.finish()

        return [self._time(exchange) for _ in range(repeats)]

    def run(
        self, path: Path, seconds: tuple[list[float], list[float]], repeats: int
    ) -> list[tuple[float, float]]:
        """Runs forward and backward of a plan; `seconds` are those of its kernel calls."""
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
    ) -> tuple[float, float]:
        q, k, v = inputs
        out: list[Tensor] = []
        self._kernel.seconds = list(seconds[0])
        forward = self._time(lambda: out.append(attention(step, q, k, v)))
        dout = torch.zeros_like(out[0])
        self._kernel.seconds = list(seconds[1])
        backward = self._time(lambda: torch.autograd.grad(out[0], inputs, dout))
        return forward, backward

    def _time(self, call: Callable[[], object]) -> float:
        """Seconds of a call that all ranks start together."""
        self._device.ready = start = self._common_start()
        sleep_until(start)
        call()
        return time.monotonic() - start

    def _common_start(self) -> float:
        dist.barrier()
        start = torch.tensor(time.monotonic() + SOON, dtype=torch.float64)
        dist.broadcast(start, 0)
        return float(start)


def main() -> None:
    rank, num_ranks, ranks_per_node = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{sys.argv[4]}:{PORT}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    runs = Rank(rank, num_ranks, ranks_per_node)
    for line in sys.stdin:
        print(json.dumps(runs.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
