"""A step that runs again and again: its wall time, the host's share, and when the GPU is busy."""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from dyncp.measure.kernel_seconds import KernelRun, profiled_kernels
from dyncp.measure.timing import Repeats, Run, mark, seconds_between, wait_for

# Iterations in a row that are profiled; kernels differ by a percent or two between them.
PROFILED = 3


@dataclass(frozen=True, slots=True)
class Steady:
    """Seconds of one iteration without a profiler: the median and the mean between iterations that
    follow one another without a pause, and the host's until it has queued one on an idle device.
    On CPUs all is the host's."""

    seconds: float
    mean_seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class Kernels:
    """Of one iteration on a GPU, by the profiler: how many kernels, copies and fills, the sum of
    their durations, that of the attention kernels among them, and in how many seconds any runs."""

    count: float
    seconds: float
    attention_seconds: float
    busy_seconds: float


def time_steady(run: Run, device: torch.device, repeats: Repeats) -> Steady:
    """Wall and host time of `run`, which ends on the current stream."""
    for _ in range(repeats.warm_up):
        run()
    marks = [mark(device)]
    for _ in range(repeats.timed):
        run()
        marks.append(mark(device))
    wait_for(device)
    between = [seconds_between(start, end) for start, end in pairwise(marks)]
    wall, mean = statistics.median(between), statistics.mean(between)
    return Steady(wall, mean, wall if device.type == "cpu" else _host(run, device, repeats))


def _host(run: Run, device: torch.device, repeats: Repeats) -> float:
    seconds = []
    for _ in range(repeats.timed):
        wait_for(device)
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    wait_for(device)
    return statistics.median(seconds)


def has_profiler(device: torch.device) -> bool:
    """Whether kernels on this device can be told apart from the host."""
    return device.type == "cuda"


def profile_steady(run: Run, device: torch.device, repeats: Repeats) -> Kernels:
    """The kernels of `run` on a GPU."""
    for _ in range(repeats.warm_up):
        run()

    def in_a_row() -> None:
        for _ in range(PROFILED):
            run()

    return summarise(profiled_kernels(in_a_row, device), PROFILED)


def summarise(kernels: Sequence[KernelRun], iterations: int) -> Kernels:
    """Kernels of so many iterations, per iteration."""
    busy = union_seconds((kernel.start, kernel.start + kernel.seconds) for kernel in kernels)
    return Kernels(
        count=len(kernels) / iterations,
        seconds=sum(kernel.seconds for kernel in kernels) / iterations,
        attention_seconds=sum(k.seconds for k in kernels if k.is_attention) / iterations,
        busy_seconds=busy / iterations,
    )


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals lasts: (0, 2), (1, 3) and (5, 6) last 4."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
