"""What the GPU's kernels of a call take, by name: the profiler's durations."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from dyncp.measure.timing import Run, wait_for

# Parts of the names of attention kernels, ours and others'; the rest packs, merges and rounds.
ATTENTION_NAMES = ("flash", "attend", "attention", "fmha", "sdpa")

# Their helpers, which are not the attention itself.
HELPER_NAMES = ("preprocess", "postprocess", "combine", "merge")


class KernelRun(NamedTuple):
    """One kernel on the device; `start` is on the profiler's clock."""

    name: str
    seconds: float
    start: float = 0.0

    @property
    def is_attention(self) -> bool:
        """The products of attention, forward or backward, and not what prepares or merges."""
        name = self.name.lower()
        return any(part in name for part in ATTENTION_NAMES) and not any(
            part in name for part in HELPER_NAMES
        )


def profiled_kernels(run: Run, device: torch.device) -> list[KernelRun]:
    """Kernels, copies and fills of one call, in the order in which they began. Time between them,
    when the device waits for the host, is in none."""
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


def kernel_seconds(run: Run, device: torch.device, repeats: int = 3) -> dict[str, float] | None:
    """Seconds per call of every kernel by name, the longest first; None where there is no GPU."""
    if device.type != "cuda":
        return None
    run()
    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        wait_for(device)
    found = {
        event.key: 1e-6 * event.self_device_time_total / repeats
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    }
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def attention_seconds(by_name: Mapping[str, float] | None) -> float | None:
    """Seconds of the attention kernels among them."""
    if by_name is None:
        return None
    runs = [KernelRun(name, seconds) for name, seconds in by_name.items()]
    return sum(run.seconds for run in runs if run.is_attention)
