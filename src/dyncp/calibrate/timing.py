"""How calls are timed: on the device, on the host, and kernel by kernel."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

# Larger than the L2 cache of any GPU so far: writing it evicts the inputs.
FLUSH_BYTES = 256 << 20
# Before a timed call the GPU sleeps for this many times the host's time, so that the host has
# queued all of the call by then; at most this many cycles (50 ms).
HEAD_START, MOST_CYCLES, CYCLES_PER_SECOND = 2.0, 100_000_000, 2e9
# Substrings of the names of attention kernels, ours and others'; the rest packs, merges and rounds.
ATTENTION_NAMES = ("flash", "attend", "attention", "fmha", "sdpa")
# Their helpers, which are not the attention itself.
HELPER_NAMES = ("preprocess", "postprocess", "combine", "merge")

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians. `seconds` is the device's time while the host keeps ahead of it; `host_seconds` is
    until the call returns. On CPUs both are the same."""

    seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a call is timed, after how many warm-up calls. `flush` clears the GPU's L2 cache
    before every call."""

    timed: int = 7
    warm_up: int = 2
    flush: bool = True

    def __post_init__(self) -> None:
        if self.timed < 1 or self.warm_up < 0:
            raise ValueError(
                f"repeats are {self.timed} after {self.warm_up} warm-up calls; at least 1 after 0 "
                "are needed"
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
        return Timed(host_seconds, host_seconds)
    return Timed(statistics.median(_cuda_seconds(run, device, repeats, max(host))), host_seconds)


def mark(device: torch.device) -> Any:
    """A point in time: an event on the current stream, or the host's clock on CPUs."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two marks; the device must have passed the second."""
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


class KernelRun(NamedTuple):
    """One kernel on the device; `start` is on the profiler's clock."""

    name: str
    seconds: float
    start: float = 0.0

    @property
    def is_attention(self) -> bool:
        """Whether it computes attention itself, and does not prepare or merge."""
        name = self.name.lower()
        return any(part in name for part in ATTENTION_NAMES) and not any(
            part in name for part in HELPER_NAMES
        )


def profiled_kernels(run: Run, device: torch.device) -> list[KernelRun]:
    """Kernels, copies and fills of one call in the order in which they started. Gaps in which the
    device waits for the host count for none of them."""
    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        wait_for(device)
    events = [e for e in profiler.events() or () if e.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    return [
        KernelRun(e.name, 1e-6 * e.time_range.elapsed_us(), 1e-6 * e.time_range.start)
        for e in events
    ]
