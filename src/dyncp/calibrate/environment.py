"""What this process runs on: its rank and device, versions and hardware."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

PACKAGES = ("dyncp", "torch", "triton", "numpy", "numba", "flash-attn-4", "mtkahypar")


@dataclass(frozen=True, slots=True)
class World:
    """This process is rank `rank` of `num_ranks`, with `ranks_per_machine` on every machine."""

    rank: int
    num_ranks: int
    ranks_per_machine: int
    device: torch.device

    @staticmethod
    def alone(device: torch.device) -> "World":
        return World(0, 1, 1, device)

    @property
    def machines(self) -> int:
        return self.num_ranks // self.ranks_per_machine

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that prints."""
        return self.rank == 0


def open_device(name: str | None, local_rank: int = 0) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1"), made the current one; by default a GPU
    where there is one. "cuda" without an index is the GPU of the process's local rank."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; choose cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no CUDA GPU here; choose cpu")
    device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    if kind == "cuda":
        _use_gpu(device)
    return device


def _use_gpu(device: torch.device) -> None:
    seen = torch.cuda.device_count()
    assert device.index is not None
    if device.index >= seen:
        raise ValueError(
            f"GPU {device.index} was asked for, but torch sees {seen}: start one rank per GPU, or "
            "check CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(device)


def device_text(device: torch.device) -> str:
    """The GPU's name, or the CPU's number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def describe_machine() -> dict[str, Any]:
    """The host: system, cores, threads, CUDA and communication backends."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "backends": _backends(),
        "nccl": _nccl_version(),
    }


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    known = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, there in known.items() if there]


def _nccl_version() -> str | None:
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        return None
    numbers: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, numbers))


def describe_devices() -> list[dict[str, Any]]:
    """All GPUs that this process sees."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def peer_access() -> list[list[bool]]:
    """Which GPUs of this machine can access each other's memory; true on the diagonal."""
    count = torch.cuda.device_count()
    return [
        [a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)]
        for a in range(count)
    ]
