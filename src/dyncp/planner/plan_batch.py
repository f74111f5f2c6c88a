"""Plans a batch: batch → blocks → placement → schedules → plan."""

import logging
from dataclasses import replace
from functools import cache
from typing import Any

from dyncp.blocks import Batch, Direction
from dyncp.cost import CostModel, model_shape, usual_decoder
from dyncp.placement import Solver, find_solver, minimal_bytes
from dyncp.plan import Plan
from dyncp.planner.choice import Choice, Tried, head_group_counts
from dyncp.planner.cold_start import compile_in_parallel
from dyncp.planner.config import AUTO, PlannerConfig
from dyncp.planner.search import place_or_warn, search, search_divisions
from dyncp.planner.task import Placed, Task
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

FEWEST_BYTES = {"fast": "bisection_bytes", "quality": "bisection_bytes_quality"}


def plan_batch(
    batch: Batch,
    topology: Topology,
    model: Any = None,
    planner: PlannerConfig | None = None,
    *,
    cost: CostModel | None = None,
) -> Plan:
    """Plans a batch. The result depends on the arguments only.

    `model` is an AttentionShape, or anything that ModelConfig.of takes: a ModelConfig, a
    Transformers model or its config. Without one, the plan has one head group and fits any layer.
    With an AttentionShape, or without a model, the work outside attention is that of a usual
    decoder with these heads, unless `planner.attention_only` is set. `cost` has the prices
    (default: those of the profile with the topology's name, p4de's if there is none).
    """
    shape, sizes = model_shape(model)
    task = Task.of(batch, topology, shape, planner, cost, sizes)
    if task.config.attention_only:
        task = replace(task, model=None)
    elif sizes is None:
        task = replace(task, model=usual_decoder(shape))
        if topology.num_ranks > 1:
            tell_usual_decoder()
    if task.config.solver != AUTO:
        return assemble_choice(task, choose(task))
    with compile_in_parallel():
        return assemble_choice(task, choose(task))


@cache
def tell_usual_decoder() -> None:
    """Logs, once per process, that sizes are assumed."""
    logger.info(
        "no sizes of the model are given: work outside attention is that of a usual decoder with "
        "these heads (32 layers, gated MLP of 3.5 × hidden; without heads those of Llama-3-8B, and "
        "plans fit any layer). Pass model= (a Transformers config or a ModelConfig), or "
        "PlannerConfig(attention_only=True) to plan for attention alone"
    )


def choose(task: Task) -> Choice:
    """The candidate that the task's config asks for. If a solver given by name fails or hangs, the
    search replaces it."""
    config = task.config
    if config.solver == AUTO:
        found = search(task) if config.objective == "time" else search_bytes(task)
    else:
        name, solver = config.solver, find_solver(config.solver)
        placed = place_or_warn(task, name, solver, config.limits, "solver auto")
        found = search(task) if placed is None else search_divisions(task, placed)
    most, balance = config.max_tokens_per_rank, found.candidate.balance
    tokens = balance.tokens_max_over_mean * task.batch.num_tokens / task.topology.num_ranks
    if most is not None and tokens > most + 0.5:
        raise ValueError(
            f"max_tokens_per_rank is {most}; the best placement found has {tokens:,.0f} tokens on "
            "one rank: raise it, use smaller batches, or set a smaller block_size"
        )
    return found


def assemble_choice(task: Task, found: Choice) -> Plan:
    """Assembles the plans of all ranks; solver "auto" adds the reasons for its choice."""
    reasons = found.explain() if task.config.solver == AUTO else ""
    return found.candidate.assemble(task.config.layout, reasons)


def plan_with(
    solver: Solver,
    batch: Batch,
    topology: Topology,
    model: Any = None,
    planner: PlannerConfig | None = None,
) -> Plan:
    """Plans a batch with this solver instead of the config's, and raises the solver's errors."""
    shape, sizes = model_shape(model)
    config = PlannerConfig() if planner is None else planner
    if config.attention_only:
        sizes = None
    elif sizes is None:
        sizes = usual_decoder(shape)
        if topology.num_ranks > 1:
            tell_usual_decoder()
    task = Task.of(batch, topology, shape, planner, None, sizes)
    return assemble_choice(task, search_divisions(task, task.place(solver)))


def search_bytes(task: Task) -> Choice:
    """The placement that moves the fewest bytes, forward and backward together. With `head_groups`
    None, tries all numbers of head groups."""
    config = task.config
    counts = head_group_counts(task) if config.head_groups is None else [config.head_groups]
    solver = find_solver(FEWEST_BYTES[config.effort])
    placed = [task.place(replace(solver, head_groups=count)) for count in counts]
    best = min(placed, key=lambda found: (found.balance.missed, _moved_bytes(found)))
    candidate = task.follow(best)
    return Choice(candidate, (Tried(solver.name, candidate.simulated.step_seconds),))


def _moved_bytes(placed: Placed) -> int:
    return sum(
        minimal_bytes(placed.graph, placed.placement, name, direction)
        for name in placed.graph.tiles
        for direction in Direction
    )
