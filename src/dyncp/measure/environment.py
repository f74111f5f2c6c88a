"""What this process runs on: versions, devices, backends."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

PACKAGES = ("dyncp", "torch", "triton", "numpy", "numba", "flash-attn-4", "mtkahypar")


def describe_versions() -> dict[str, str | None]:
    """Of Python and the packages that matter; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def describe_machine() -> dict[str, Any]:
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
    """Which GPUs of this machine can read each other's memory; true on the diagonal."""
    count = torch.cuda.device_count()
    return [
        [a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)]
        for a in range(count)
    ]
