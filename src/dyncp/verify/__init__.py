"""Checks plans: static invariants of any plan, and a numpy interpreter for small batches.

Shares no arithmetic with planner, executor and kernels, so that it stays an independent oracle.
"""

from dyncp.verify.interpret import Interpreted, interpret
from dyncp.verify.kernel_call import ListedKernelTiles, check_kernel_call
from dyncp.verify.verify_plan import check_plan, verify_plan
from dyncp.verify.violation import INVARIANTS, PlanError, Violation

__all__ = [
    "INVARIANTS",
    "Interpreted",
    "ListedKernelTiles",
    "PlanError",
    "Violation",
    "check_kernel_call",
    "check_plan",
    "interpret",
    "verify_plan",
]
