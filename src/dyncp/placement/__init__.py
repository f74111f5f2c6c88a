"""Third stage: blocks and tiles get ranks."""

from dyncp.placement.bisection import (
    bisection,
    bisection_bytes,
    bisection_bytes_quality,
    bisection_quality,
)
from dyncp.placement.hypergraph import hypergraph
from dyncp.placement.placement import (
    DEFAULT_TOLERANCES,
    Balance,
    Limits,
    Placement,
    RemoteUses,
    Traffic,
    check_placement,
    find_remote_uses,
    measure_balance,
    minimal_bytes,
)
from dyncp.placement.random import random
from dyncp.placement.rows import rows, rows_fine
from dyncp.placement.solver import Solver
from dyncp.placement.static import (
    STATIC_SOLVERS,
    Bound,
    StaticBounds,
    hybrid_with_budget,
    static_candidates,
    static_solver,
    whole_rows,
    with_degree,
)
from dyncp.placement.timed import Prices, improve
from dyncp.placement.whole_documents import uncut, whole_documents

SOLVERS = {
    solver.name: solver
    for solver in (
        bisection,
        bisection_bytes,
        bisection_quality,
        bisection_bytes_quality,
        rows,
        rows_fine,
        hypergraph,
        whole_documents,
        uncut,
        *STATIC_SOLVERS,
        random,
    )
}


def find_solver(name: str) -> Solver:
    """A solver by its name; static methods also with degrees, as in "zigzag/cp8"."""
    if name in SOLVERS:
        return SOLVERS[name]
    if name.partition("/")[0] not in SOLVERS:
        raise ValueError(f"solver is {name!r}; choose one of {', '.join(SOLVERS)}")
    return static_solver(name)


__all__ = [
    "DEFAULT_TOLERANCES",
    "SOLVERS",
    "Balance",
    "Bound",
    "Limits",
    "Placement",
    "Prices",
    "RemoteUses",
    "Solver",
    "StaticBounds",
    "Traffic",
    "check_placement",
    "find_remote_uses",
    "find_solver",
    "hybrid_with_budget",
    "improve",
    "measure_balance",
    "minimal_bytes",
    "static_candidates",
    "whole_rows",
    "with_degree",
]
