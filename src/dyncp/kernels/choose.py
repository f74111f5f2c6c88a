"""Chooses a kernel by name or by device."""

import logging

import torch

from dyncp.kernels.cpu import CpuKernel
from dyncp.kernels.kernel import Kernel
from dyncp.kernels.reference import ReferenceKernel

logger = logging.getLogger(__name__)

KERNELS: dict[str, type] = {"cpu": CpuKernel, "reference": ReferenceKernel}


def choose_kernel(
    kernel: str | Kernel,
    device: torch.device,
    deterministic: bool = True,  # noqa: ARG001
) -> Kernel:
    """The kernel named (or given); "auto" takes `cpu` on the CPU and `reference` elsewhere."""
    if not isinstance(kernel, str):
        return kernel
    if kernel == "auto":
        if device.type == "cpu":
            return CpuKernel()
        logger.warning(
            "no fast kernel for %s yet: kernel 'reference' computes in fp64 and is slow", device
        )
        return ReferenceKernel()
    if kernel not in KERNELS:
        raise ValueError(f"kernel is {kernel!r}; choose one of auto, {', '.join(KERNELS)}")
    chosen: Kernel = KERNELS[kernel]()
    return chosen
