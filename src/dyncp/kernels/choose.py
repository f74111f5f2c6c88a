"""Chooses a kernel by name, or the best one for a device."""

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
FLASH4_VERSION = "4.0.0b36"  # we call its compiled kernels directly, and other versions may differ
INSTALL_FLASH4 = "pip install 'dyncp[flash4]'"
INSTALL_TRITON = "pip install triton"
DETERMINISTIC_FLASH4 = (
    "kernel 'flash4', deterministic=True: forward by flash-attn-4, backward by 'triton', because "
    "flash-attn-4 has no deterministic backward over tile lists on Hopper. deterministic=False is "
    "faster"
)


def choose_kernel(kernel: str | Kernel, device: torch.device, deterministic: bool = True) -> Kernel:
    """The kernel of this name, or the one given. "auto" chooses `cpu` on CPUs; on GPUs `flash4` if
    it can run there, else `triton`; and logs which kernel it chose and why."""
    if not isinstance(kernel, str):
        expected = f"a dyncp.kernels.Kernel, or one of auto, {', '.join(KERNELS)}"
        instance_of("kernel", kernel, Kernel, expected)
        return kernel
    if kernel == "auto":
        name, reason = best_kernel(device)
        level = logging.WARNING if name == "reference" else logging.INFO
        _log_once(level, f"kernel {name!r} on {device}: {reason}")
        return _make(name, deterministic)
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; choose one of auto, {', '.join(KERNELS)}")
    missing = why_not(kernel, device)
    if missing:
        raise ValueError(f"kernel {kernel!r} is not available on {device}: {missing}")
    return _make(kernel, deterministic)


def reason_for(kernel: str | Kernel, device: torch.device) -> str:
    """The reason for the choice of `choose_kernel`, as logged."""
    return best_kernel(device)[1] if kernel == "auto" else "it was requested"


def best_kernel(device: torch.device) -> tuple[str, str]:
    """The kernel that "auto" chooses on a device, and the reason."""
    if device.type == "cpu":
        return "cpu", "the device is a CPU"
    refused: list[str] = []
    for name in ("flash4", "triton"):
        missing = why_not(name, device)
        if not missing:
            return name, "; ".join(["the fastest one on this device", *refused])
        refused.append(f"{name!r} is not available: {missing}")
    return "reference", f"slow, computes in fp64; {'; '.join(refused)}"


def why_not(kernel: str, device: torch.device) -> str:
    """The reason why a kernel cannot run on a device, and what to do; empty if it can."""
    if kernel == "reference":
        return ""
    if kernel == "cpu":
        return "" if device.type == "cpu" else "it runs on CPU tensors; choose triton or flash4"
    if device.type != "cuda":
        return "it runs on CUDA GPUs; choose cpu or reference"
    major = torch.cuda.get_device_capability(device)[0]
    return _why_not_flash4(major) if kernel == "flash4" else _why_not_triton(major)


def _why_not_flash4(major: int) -> str:
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        version = "no version"
    if version != FLASH4_VERSION:
        needed = f"flash-attn-4 {FLASH4_VERSION} is needed, {version} is installed"
        return f"{needed}; {INSTALL_FLASH4}"
    if major != HOPPER:
        return f"it runs on Hopper (compute capability 9), this GPU has {major}; choose triton"
    return _why_not_imported("flash_attn.cute", INSTALL_FLASH4)


def _why_not_triton(major: int) -> str:
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed; {INSTALL_TRITON}"
    if major < AMPERE:
        return f"it needs compute capability 8 or more, this GPU has {major}"
    return _why_not_imported("triton", INSTALL_TRITON)


@cache
def _why_not_imported(module: str, install: str) -> str:
    """An installed package may be broken: half installed, or built for another CUDA version."""
    try:
        importlib.import_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return f"{module} is installed but fails to import ({reason}); reinstall it: {install}"
    return ""


@cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)


def _make(name: str, deterministic: bool) -> Kernel:
    """Imports GPU kernels only when they are used, because they need Triton and flash-attn-4."""
    if name == "flash4":
        from dyncp.kernels.flash4_kernel import Flash4Kernel

        if deterministic:
            _log_once(logging.INFO, DETERMINISTIC_FLASH4)
        return Flash4Kernel(deterministic=deterministic)
    if name == "triton":
        from dyncp.kernels.triton_kernel import TritonKernel

        return TritonKernel()
    return CpuKernel() if name == "cpu" else ReferenceKernel()
