"""Chooses a kernel by name, or by what the device has."""

import importlib
import importlib.metadata
import importlib.util
import logging
from functools import cache

import torch

from dyncp.checks import instance_of
from dyncp.kernels.cpu import CpuKernel
from dyncp.kernels.kernel import Kernel
from dyncp.kernels.reference import ReferenceKernel

logger = logging.getLogger(__name__)

KERNELS = ("cpu", "flash4", "triton", "reference")
AMPERE, HOPPER = 8, 9
FLASH4_VERSION = "4.0.0b36"  # its compiled kernels are called directly: other versions may differ
INSTALL_FLASH4 = "pip install 'dyncp[flash4]'"
INSTALL_TRITON = "pip install triton"


def choose_kernel(kernel: str | Kernel, device: torch.device, deterministic: bool = True) -> Kernel:
    """The kernel named (or given). "auto" takes `cpu` on the CPU; on a GPU `flash4` where it is
    installed and fits, else `triton`; the log says which and why."""
    if not isinstance(kernel, str):
        expected = f"a dyncp.kernels.Kernel, or one of auto, {', '.join(KERNELS)}"
        instance_of("kernel", kernel, Kernel, expected)
        return kernel
    if kernel == "auto":
        name, reason = best_kernel(device)
        _log_once(name, str(device), reason)
        return _make(name, deterministic)
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; choose one of auto, {', '.join(KERNELS)}")
    missing = why_not(kernel, device)
    if missing:
        raise ValueError(f"kernel {kernel!r} is not available on {device}: {missing}")
    return _make(kernel, deterministic)


def reason_for(kernel: str | Kernel, device: torch.device) -> str:
    """Why `choose_kernel` takes the kernel that it takes, as logged."""
    return best_kernel(device)[1] if kernel == "auto" else "it was asked for"


def best_kernel(device: torch.device) -> tuple[str, str]:
    """What "auto" takes on a device, and why."""
    if device.type == "cpu":
        return "cpu", "the device is a CPU"
    refused: list[str] = []
    for name in ("flash4", "triton"):
        missing = why_not(name, device)
        if not missing:
            return name, "; ".join(["the fastest there is on this device", *refused])
        refused.append(f"{name!r} is not available: {missing}")
    return "reference", f"slow, computes in fp64; {'; '.join(refused)}"


def why_not(kernel: str, device: torch.device) -> str:
    """Why a kernel cannot run on a device, and what to do; empty if it can."""
    if kernel == "reference":
        return ""
    if kernel == "cpu":
        return "" if device.type == "cpu" else "it runs on CPU tensors; choose triton or flash4"
    if device.type != "cuda":
        return "it runs on CUDA GPUs; choose cpu or reference"
    major = torch.cuda.get_device_capability(device)[0]
    return _why_not_flash4(major) if kernel == "flash4" else _why_not_triton(major)


def _why_not_flash4(major: int) -> str:
    if not _is_installed("flash_attn.cute"):
        return f"flash-attn-4 is not installed; {INSTALL_FLASH4}"
    version = _version("flash-attn-4")
    if version != FLASH4_VERSION:
        return f"flash-attn-4 {version} is installed, {FLASH4_VERSION} is needed; {INSTALL_FLASH4}"
    if major != HOPPER:
        return f"it runs on Hopper (compute capability 9), this GPU has {major}; choose triton"
    return _why_not_imported("flash_attn.cute", INSTALL_FLASH4)


def _why_not_triton(major: int) -> str:
    if not _is_installed("triton"):
        return f"triton is not installed; {INSTALL_TRITON}"
    if major < AMPERE:
        return f"it needs compute capability 8 or more, this GPU has {major}"
    return _why_not_imported("triton", INSTALL_TRITON)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


@cache
def _why_not_imported(module: str, install: str) -> str:
    """A package may be there and broken: a half-finished install, or another CUDA's libraries."""
    try:
        importlib.import_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return f"{module} is installed and fails to import ({reason}); reinstall it: {install}"
    return ""


@cache
def _log_once(name: str, device: str, reason: str) -> None:
    level = logging.WARNING if name == "reference" else logging.INFO
    logger.log(level, "kernel %r on %s: %s", name, device, reason)


@cache
def _log_deterministic() -> None:
    logger.info(
        "kernel 'flash4', deterministic=True: forward by flash-attn-4, backward by 'triton': "
        "flash-attn-4 has no deterministic backward over tile lists on Hopper. "
        "deterministic=False is faster"
    )


def _make(name: str, deterministic: bool) -> Kernel:
    """GPU kernels are imported late: only they need Triton and flash-attn-4."""
    if name == "flash4":
        from dyncp.kernels.flash4_kernel import Flash4Kernel

        if deterministic:
            _log_deterministic()
        return Flash4Kernel(deterministic=deterministic)
    if name == "triton":
        from dyncp.kernels.triton_kernel import TritonKernel

        return TritonKernel()
    return CpuKernel() if name == "cpu" else ReferenceKernel()
