"""PlannerConfig: the options of the planner, checked when it is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dyncp.checks import MOST_TOKENS, instance_of, one_of, whole_number
from dyncp.placement import Limits, find_solver
from dyncp.plan import Layout

# The solver that compares all others by simulated step time, or by bytes.
AUTO = "auto"
EFFORTS = ("fast", "quality")
OBJECTIVES = ("time", "bytes")
# Integer options with their smallest and largest value.
WHOLE_NUMBERS = (
    ("block_size", 1, MOST_TOKENS),
    ("head_groups", 1, MOST_TOKENS),
    ("divisions", 2, 1024),
    ("max_tokens_per_rank", 1, MOST_TOKENS),
    ("seed", 0, 2**63 - 1),
)


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """`solver` is "auto", a name of `dyncp.placement.SOLVERS`, or a static method with degrees
    ("zigzag/cp8"). "auto" searches for the best `objective`: the shortest simulated step ("time"),
    static methods included, or the fewest bytes ("bytes"). `effort` "quality" tries more candidates
    than "fast".

    `block_size` fixes the block size (None: the solver chooses one per sequence).
    `head_groups` is the number of groups that kv heads are split into (None: searched).
    `divisions` is the largest number of divisions per direction (None: searched).
    `attention_only` leaves work outside attention out; otherwise a model of unknown sizes is
    assumed to be a usual decoder, since that work goes by tokens.
    `layers` is the number of attention layers per mask name (default: equally many); plans are
    chosen by the time of all layers. `forward_only` plans evaluation. Plans keep `limits` if any
    placement does, and `max_tokens_per_rank` always. A solver that takes longer than
    `solver_seconds` is abandoned.
    """

    solver: str = AUTO
    block_size: int | None = None
    head_groups: int | None = 1
    divisions: int | None = None
    seed: int = 0
    forward_only: bool = False
    limits: Limits = field(default_factory=Limits)
    layout: Layout = field(default_factory=Layout)
    effort: str = "fast"
    objective: str = "time"
    max_tokens_per_rank: int | None = None
    solver_seconds: float = 600.0
    layers: Mapping[str, int] | None = None
    attention_only: bool = False

    def __post_init__(self) -> None:
        instance_of("solver", self.solver, str, "the name of one, or auto")
        instance_of("limits", self.limits, Limits, "Limits")
        instance_of("layout", self.layout, Layout, "a Layout")
        if self.solver != AUTO:
            find_solver(self.solver)
        one_of("effort", self.effort, EFFORTS)
        one_of("objective", self.objective, OBJECTIVES)
        if self.layers is not None:
            instance_of("layers", self.layers, Mapping, "numbers of layers by mask name")
            layers = {n: whole_number(f"layers[{n!r}]", x, 0) for n, x in self.layers.items()}
            object.__setattr__(self, "layers", layers)
        for name, least, most in WHOLE_NUMBERS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, least, most))
        instance_of("solver_seconds", self.solver_seconds, (int, float), "a positive number")
        if not self.solver_seconds > 0:
            raise ValueError(f"solver_seconds is {self.solver_seconds}; it must be positive")
