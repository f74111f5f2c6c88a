"""Placement stage: assigns blocks and tiles to ranks."""

from dyncp.placement.bisection import (
    bisection,
    bisection_bytes,
    bisection_bytes_quality,
    bisection_quality,
)
from dyncp.placement.hypergraph import hypergraph
from dyncp.placement.improve_by_time import improve
from dyncp.placement.owner_computes import owner_computes, owner_computes_fine
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
from dyncp.placement.solver import Solver, random
from dyncp.placement.static_bounds import Bound, StaticBounds, whole_rows
from dyncp.placement.static_methods import (
    STATIC_SOLVERS,
    static_candidates,
    static_solver,
    uncut,
    with_degree,
)
from dyncp.placement.step_estimate import Prices

SOLVERS = {
    solver.name: solver
    for solver in (
        bisection,
        bisection_bytes,
        bisection_quality,
        bisection_bytes_quality,
        owner_computes,
        owner_computes_fine,
        hypergraph,
        uncut,
        *STATIC_SOLVERS,
        random,
    )
}


def find_solver(name: str) -> Solver:
    """The solver with this name; static methods may have degrees, as in "zigzag/cp8"."""
    if name in SOLVERS:
        return SOLVERS[name]
    if name.partition("/")[0] not in SOLVERS:
        raise ValueError(f"solver is {name!r}; choose one of {', '.join(SOLVERS)}")
    return static_solver(name)
