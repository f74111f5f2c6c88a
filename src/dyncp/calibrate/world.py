"""The ranks and devices that are measured: torchrun's processes, or this process alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dyncp.checks import usable_cores

TIMEOUT = timedelta(minutes=10)  # of collectives between ranks


@dataclass(frozen=True, slots=True)
class World:
    """This process is rank `rank` of `num_ranks`, with `ranks_per_node` on every node."""

    rank: int
    num_ranks: int
    ranks_per_node: int
    device: torch.device

    @staticmethod
    def alone(device: torch.device) -> "World":
        return World(0, 1, 1, device)

    @property
    def nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that prints."""
        return self.rank == 0


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def open_world(device_name: str | None) -> Iterator[World]:
    """Opens the device, and under torchrun the process group."""
    if not under_torchrun():
        yield World.alone(open_device(device_name))
        return
    local_rank, local = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device = open_device(device_name, local_rank)
    torch.set_num_threads(max(1, usable_cores() // local))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local, device)
    finally:
        dist.destroy_process_group()


def open_device(name: str | None, local_rank: int = 0) -> torch.device:
    """Makes the device called `name` ("cpu", "cuda", "cuda:1") the current one and returns it. The
    default is a GPU if there is one, else the CPU; "cuda" is the GPU of the local rank."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; choose cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no CUDA GPU here; choose cpu")
    device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    if kind == "cuda":
        seen = torch.cuda.device_count()
        if device.index >= seen:
            raise ValueError(
                f"GPU {device.index} was requested, but torch sees {seen} GPUs: start one rank per "
                "GPU, or check CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


def device_text(device: torch.device) -> str:
    """The GPU's name, or the CPU with its number of threads."""
    if device.type == "cuda":
        return device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
