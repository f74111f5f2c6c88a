"""Checks plans: static invariants of plans of any size, and a numpy interpreter for small batches.

It shares no arithmetic with planner, executor and kernels, so that it stays an independent oracle.
"""

from dyncp.verify.coverage import ListedKernelTiles
from dyncp.verify.interpret import (
    Comparison,
    Interpreted,
    compare_with_dense,
    dense_attention,
    interpret,
    num_scores,
)
from dyncp.verify.verify_plan import (
    INVARIANTS,
    PlanError,
    Verified,
    Violation,
    check_kernel_call,
    check_plan,
    examine_plan,
    verify_plan,
)
