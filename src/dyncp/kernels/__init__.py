"""Kernels compute the tiles of a division, and row operations move and merge their rows."""

from dyncp.kernels.choose import KERNELS, choose_kernel, reason_for, why_not
from dyncp.kernels.cpu import CpuKernel
from dyncp.kernels.kernel import (
    BackwardInputs,
    Gradients,
    IndexArrays,
    Kernel,
    KernelCall,
    RowState,
    RowStates,
    Sums,
)
from dyncp.kernels.reference import ReferenceKernel
from dyncp.kernels.row_ops import (
    Dtypes,
    Memory,
    RowOps,
    accumulator_dtype,
    choose_row_ops,
    share_of,
)
