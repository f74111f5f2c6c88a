"""Kernels compute tiles into partial outputs and log-sum-exps."""

from dyncp.kernels.accumulate import accumulator_dtype, merge_partial
from dyncp.kernels.choose import KERNELS, choose_kernel, reason_for
from dyncp.kernels.cpu import CpuKernel
from dyncp.kernels.index_arrays import Index, IndexArrays
from dyncp.kernels.kernel import Gradients, Kernel, KernelCall, RowState, RowStates, Sums
from dyncp.kernels.reference import ReferenceKernel, list_kernel_tiles
from dyncp.kernels.row_ops import Dtypes, Memory, RowOps, TorchRowOps, choose_row_ops

__all__ = [
    "KERNELS",
    "CpuKernel",
    "Dtypes",
    "Gradients",
    "Index",
    "IndexArrays",
    "Kernel",
    "KernelCall",
    "Memory",
    "ReferenceKernel",
    "RowOps",
    "RowState",
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
