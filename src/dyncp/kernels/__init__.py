"""Kernels compute tiles into partial outputs and log-sum-exps."""

from dyncp.kernels.choose import KERNELS as KERNELS
from dyncp.kernels.choose import choose_kernel as choose_kernel
from dyncp.kernels.choose import reason_for as reason_for
from dyncp.kernels.cpu import CpuKernel as CpuKernel
from dyncp.kernels.kernel import BackwardInputs as BackwardInputs
from dyncp.kernels.kernel import Gradients as Gradients
from dyncp.kernels.kernel import IndexArrays as IndexArrays
from dyncp.kernels.kernel import Kernel as Kernel
from dyncp.kernels.kernel import KernelCall as KernelCall
from dyncp.kernels.kernel import RowState as RowState
from dyncp.kernels.kernel import RowStates as RowStates
from dyncp.kernels.kernel import Sums as Sums
from dyncp.kernels.reference import ReferenceKernel as ReferenceKernel
from dyncp.kernels.row_ops import Dtypes as Dtypes
from dyncp.kernels.row_ops import Memory as Memory
from dyncp.kernels.row_ops import RowOps as RowOps
from dyncp.kernels.row_ops import TorchRowOps as TorchRowOps
from dyncp.kernels.row_ops import accumulator_dtype as accumulator_dtype
from dyncp.kernels.row_ops import choose_row_ops as choose_row_ops
