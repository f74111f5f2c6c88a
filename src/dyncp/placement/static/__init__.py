"""Static context parallelism: methods that cut and move the same way whatever the mask needs."""

from dyncp.placement.static.candidates import (
    Bound,
    StaticBounds,
    static_candidates,
    static_solver,
    whole_rows,
    with_degree,
)
from dyncp.placement.static.hybrid import hybrid_with_budget, megatron_hybrid
from dyncp.placement.static.methods import METHODS

STATIC_SOLVERS = (*(with_degree(name) for name in METHODS), megatron_hybrid)

__all__ = [
    "METHODS",
    "STATIC_SOLVERS",
    "Bound",
    "StaticBounds",
    "hybrid_with_budget",
    "static_candidates",
    "static_solver",
    "whole_rows",
    "with_degree",
]
