"""What torchrun tells its processes, and the process group that they make."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from dyncp.cli.launch import threads_per_rank

if TYPE_CHECKING:
    from dyncp.measure.world import World

TIMEOUT = timedelta(minutes=10)


def under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def open_world(device_name: str | None) -> "Iterator[World]":
    """The world of torchrun's ranks, or of this process alone."""
    import torch
    import torch.distributed as dist

    from dyncp.measure.world import World, open_device

    if not under_torchrun():
        yield World.alone(open_device(device_name))
        return
    local_rank, local = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device = open_device(device_name, local_rank)
    if device.type == "cpu":
        torch.set_num_threads(threads_per_rank(local))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local, device)
    finally:
        dist.destroy_process_group()
