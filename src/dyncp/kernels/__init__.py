"""Kernels compute tiles into partial outputs and log-sum-exps."""

from dyncp.kernels.accumulate import accumulator_dtype
from dyncp.kernels.call import Held, KernelCall, RowStates
from dyncp.kernels.choose import KERNELS, choose_kernel, reason_for
from dyncp.kernels.cpu import CpuKernel
from dyncp.kernels.index_arrays import Index, IndexArrays
from dyncp.kernels.kernel import Gradients, Kernel, Sums
from dyncp.kernels.kernel_tiles import KernelTiles, list_kernel_tiles
from dyncp.kernels.memory import Dtypes, Memory
from dyncp.kernels.merge import merge_partial
from dyncp.kernels.reference import ReferenceKernel
from dyncp.kernels.row_ops import RowOps, TorchRowOps, choose_row_ops

__all__ = [
    "KERNELS",
    "CpuKernel",
    "Dtypes",
    "Gradients",
    "Held",
    "Index",
    "IndexArrays",
    "Kernel",
    "KernelCall",
    "KernelTiles",
    "Memory",
    "ReferenceKernel",
    "RowOps",
    "RowStates",
    "Sums",
    "TorchRowOps",
    "accumulator_dtype",
    "choose_kernel",
    "choose_row_ops",
    "list_kernel_tiles",
    "merge_partial",
    "reason_for",
]
