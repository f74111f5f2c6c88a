"""What is measured: the planner's choice, and static methods at their best split."""

from collections.abc import Callable, Sequence

from dyncp.placement import static_candidates
from dyncp.placement.static import STATIC_SOLVERS
from dyncp.planner import AUTO, Candidate, Task, choose

STATIC_METHODS = tuple(solver.name for solver in STATIC_SOLVERS)
METHODS = (AUTO, *STATIC_METHODS)


def check_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The methods named; "all" are all of them."""
    for name in names:
        if name not in (*METHODS, "all"):
            raise ValueError(f"method is {name!r}; choose from {', '.join(METHODS)}, or all")
    return METHODS if "all" in names else tuple(dict.fromkeys(names))


def find_candidates(
    task: Task, methods: Sequence[str], tell: Callable[[str], None] = lambda _: None
) -> dict[str, Candidate]:
    """A candidate for each method; static ones have the split with the shortest simulated step."""
    found: dict[str, Candidate] = {}
    if AUTO in methods:
        tell(f"planning with {AUTO} ...")
        found[AUTO] = choose(task).candidate
    static = tuple(name for name in methods if name != AUTO)
    best: dict[str, float] = {}
    splits = static_candidates(task.batch.lengths, task.shape, task.topology, static)
    for index, solver in enumerate(splits if static else []):
        tell(f"planning with {solver.name} ...")
        candidate = task.schedule(task.place(solver))
        seconds = task.simulate(candidate).step_seconds
        # The first is data parallelism alone, which is one of every method's splits.
        for name in static if index == 0 else [solver.name.partition("/")[0]]:
            if seconds < best.get(name, float("inf")):
                best[name], found[name] = seconds, candidate
    return {name: found[name] for name in methods}
