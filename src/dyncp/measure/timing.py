"""Time of a call: on the device, and on the host until it returns."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Larger than the second-level cache of any GPU so far: writing it leaves nothing of the inputs.
FLUSH_BYTES = 256 << 20
# Before a timed call a GPU idles for this many times the host's time, so that the host has queued
# all of it by then; at most so many cycles (50 ms).
HEAD_START, MOST_CYCLES, CYCLES_PER_SECOND = 2.0, 100_000_000, 2e9

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
    host = [_host_seconds(run, device) for _ in range(repeats.timed)]
    host_seconds = statistics.median(host)
    if device.type != "cuda":
        return Timed(host_seconds, host_seconds, repeats.timed)
    seconds = statistics.median(_cuda_seconds(run, device, repeats, max(host)))
    return Timed(seconds, host_seconds, repeats.timed)


def mark(device: torch.device) -> Any:
    """A point in time: of the current stream, or on the host."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Between two marks; the device must have passed the second."""
    if isinstance(start, float):
        return float(end - start)
    return 1e-3 * float(start.elapsed_time(end))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_seconds(run: Run, device: torch.device) -> float:
    """Until the call returns, on an idle device."""
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    wait_for(device)
    return seconds


def _cuda_seconds(run: Run, device: torch.device, repeats: Repeats, host: float) -> list[float]:
    cycles = min(MOST_CYCLES, int(HEAD_START * host * CYCLES_PER_SECOND))
    cache = torch.empty(FLUSH_BYTES if repeats.flush else 0, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats.timed):
        cache.zero_()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        start = mark(device)
        run()
        end = mark(device)
        wait_for(device)
        seconds.append(seconds_between(start, end))
    return seconds
