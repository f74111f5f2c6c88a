"""Static solvers by name: "zigzag", "zigzag/cp8", "loongtrain/cp8h2", "megatron_hybrid"."""

import re

from dyncp.placement.solver import Solver
from dyncp.placement.static.candidates import with_degree
from dyncp.placement.static.hybrid import hybrid_with_budget, megatron_hybrid

_DEGREES = re.compile(r"(?:cp(\d+))?(?:h(\d+))?")
_BUDGET = re.compile(r"tokens(\d+)")


def static_solver(name: str) -> Solver:
    """The solver that has this name; ValueError if there is none."""
    method, _, degrees = name.partition("/")
    if method == megatron_hybrid.name:
        budget = _BUDGET.fullmatch(degrees)
        if degrees and budget is None:
            raise ValueError(f"solver is {name!r}; write it as {method}/tokens4096")
        return megatron_hybrid if budget is None else hybrid_with_budget(int(budget[1]))
    found = _DEGREES.fullmatch(degrees)
    if found is None:
        raise ValueError(f"solver is {name!r}; write degrees as {method}/cp8 or {method}/cp8h2")
    degree, heads = (None if value is None else int(value) for value in found.groups())
    return with_degree(method, degree, heads)
