"""Search for the fewest bytes that keep the limits."""

from dyncp.blocks import Direction
from dyncp.placement import find_solver, minimal_bytes
from dyncp.planner.candidate import Cut, Placed
from dyncp.planner.choice import Choice, Tried, head_group_counts
from dyncp.planner.task import Task

SOLVERS = {"fast": "bisection_bytes", "quality": "bisection_bytes_quality"}


def search_bytes(task: Task) -> Choice:
    """The placement of fewest bytes, forward and backward; `head_groups` None tries all counts."""
    config = task.config
    counts = head_group_counts(task) if config.head_groups is None else [config.head_groups]
    solver = find_solver(SOLVERS[config.effort])
    placed = [task.place(solver, cut=Cut(config.block_size, count)) for count in counts]
    best = min(placed, key=lambda found: (found.balance.missed, moved_bytes(found)))
    candidate = task.schedule(best)
    simulated = task.simulate(candidate)
    return Choice(candidate, simulated, (Tried(solver.name, simulated.step_seconds),))


def moved_bytes(placed: Placed) -> int:
    return sum(
        minimal_bytes(placed.graph, placed.placement, name, direction)
        for name in placed.graph.tiles
        for direction in Direction
    )
