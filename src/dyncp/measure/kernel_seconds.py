"""What the GPU's kernels of a call take, by name: the profiler's durations."""

from collections.abc import Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from dyncp.measure.timing import Run, wait_for

# Parts of the names of attention kernels, ours and others'; the rest packs, merges and rounds.
ATTENTION_NAMES = ("flash", "attend", "attention", "fmha", "sdpa")


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
    return sum(
        seconds
        for name, seconds in by_name.items()
        if any(part in name.lower() for part in ATTENTION_NAMES)
    )
