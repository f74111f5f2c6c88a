"""Time of a call: on the device, and on the host until it returns."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Larger than the second-level cache of any GPU so far: writing it leaves nothing of the inputs.
FLUSH_BYTES = 256 << 20
# Cycles that a GPU idles before a timed call, so that the host has queued all of it by then: first
# a guess (about 5 ms), then this many times the host time that was seen.
FIRST_HEAD_START, HEAD_START = 10_000_000, 3.0
CYCLES_PER_SECOND = 2e9

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians. `seconds` is what the device needs when the host keeps ahead of it; `host_seconds`
    is until the call returns. On the CPU both are the same."""

    seconds: float
    host_seconds: float
    repeats: int


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a call is timed, after how many that warm up. `flush` empties the GPU's cache
    before every call."""

    timed: int = 7
    warm_up: int = 2
    flush: bool = True

    def __post_init__(self) -> None:
        if self.timed < 1 or self.warm_up < 0:
            raise ValueError(
                f"repeats are {self.timed} after {self.warm_up} that warm up; "
                "at least 1 after 0 are needed"
            )


def time_call(run: Run, device: torch.device, repeats: Repeats | None = None) -> Timed:
    """Median times of `run`, which may only use the current stream."""
    repeats = repeats or Repeats()
    for _ in range(repeats.warm_up):
        run()
    wait_for(device)
    times = _cuda_times if device.type == "cuda" else _host_times
    device_seconds, host_seconds = zip(*times(run, device, repeats), strict=True)
    return Timed(statistics.median(device_seconds), statistics.median(host_seconds), repeats.timed)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_times(run: Run, _: torch.device, repeats: Repeats) -> list[tuple[float, float]]:
    times = []
    for _repeat in range(repeats.timed):
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        times.append((seconds, seconds))
    return times


def _cuda_times(run: Run, device: torch.device, repeats: Repeats) -> list[tuple[float, float]]:
    times, cycles = [], FIRST_HEAD_START
    cache = torch.empty(FLUSH_BYTES if repeats.flush else 0, dtype=torch.uint8, device=device)
    for _repeat in range(repeats.timed):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(cycles)
        start.record()
        before = time.perf_counter()
        run()
        host = time.perf_counter() - before
        end.record()
        torch.cuda.synchronize(device)
        times.append((1e-3 * start.elapsed_time(end), host))
        cycles = max(cycles, int(HEAD_START * host * CYCLES_PER_SECOND))
    return times


def back_to_back_seconds(run: Run, device: torch.device, repeats: Repeats | None = None) -> float:
    """Seconds per call of calls that follow each other: host or device, whichever is slower."""
    repeats = repeats or Repeats()
    for _ in range(repeats.warm_up):
        run()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats.timed):
        run()
    wait_for(device)
    return (time.perf_counter() - start) / repeats.timed
