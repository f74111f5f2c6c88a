"""Kernels compute tiles into partial outputs and log-sum-exps."""

from dyncp.kernels.call import KernelCall
from dyncp.kernels.choose import KERNELS, choose_kernel
from dyncp.kernels.cpu import CpuKernel
from dyncp.kernels.kernel import Kernel
from dyncp.kernels.kernel_tiles import KernelTiles, list_kernel_tiles
from dyncp.kernels.merge import merge_partial
from dyncp.kernels.reference import ReferenceKernel

__all__ = [
    "KERNELS",
    "CpuKernel",
    "Kernel",
    "KernelCall",
    "KernelTiles",
    "ReferenceKernel",
    "choose_kernel",
    "list_kernel_tiles",
    "merge_partial",
]
