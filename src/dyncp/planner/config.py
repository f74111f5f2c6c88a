"""PlannerConfig: the choices of the planner, checked when it is built."""

from dataclasses import dataclass, field

from dyncp.placement import Limits, find_solver
from dyncp.plan import Layout

# Chooses among solvers by the simulated time of the step.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """`solver` is a name of `dyncp.placement.SOLVERS`, a static method with degrees ("zigzag/cp8"),
    or "auto" for the shortest simulated step of all; `block_size` fixes the block size (default:
    chosen per sequence by the solver's method); `divisions` is the most overlap steps per
    direction; `forward_only` plans evaluation."""

    solver: str = "bisection"
    block_size: int | None = None
    head_groups: int = 1
    divisions: int = 4
    seed: int = 0
    forward_only: bool = False
    limits: Limits = field(default_factory=Limits)
    layout: Layout = field(default_factory=Layout)

    def __post_init__(self) -> None:
        if self.solver != AUTO:
            find_solver(self.solver)
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(
                f"block_size is {self.block_size}; at least 1 token is needed, or None"
            )
        if self.divisions < 2:
            raise ValueError(
                f"divisions is {self.divisions}; at least 2 are needed, one local and one remote"
            )
        if self.head_groups < 1:
            raise ValueError(f"head_groups is {self.head_groups}; at least 1 is needed")
