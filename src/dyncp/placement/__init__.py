"""Third stage: blocks and tiles get ranks."""

from dyncp.placement.placement import (
    Balance,
    Limits,
    Placement,
    check_placement,
    measure_balance,
)
from dyncp.placement.random import random
from dyncp.placement.remote import RemoteUses, find_remote_uses, minimal_bytes
from dyncp.placement.solver import Solver
from dyncp.placement.whole_documents import whole_documents
from dyncp.placement.zigzag import zigzag

SOLVERS = {solver.name: solver for solver in (whole_documents, zigzag, random)}

__all__ = [
    "SOLVERS",
    "Balance",
    "Limits",
    "Placement",
    "RemoteUses",
    "Solver",
    "check_placement",
    "find_remote_uses",
    "measure_balance",
    "minimal_bytes",
]
