"""Ways into the simulator: a schedule, all schedules of a placement, a plan."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import DEFAULT_MASK, BlockGraph, Direction
from dyncp.cost import CostModel, ModelConfig
from dyncp.placement import Placement
from dyncp.plan import Plan
from dyncp.schedule import Schedule
from dyncp.simulate.flow import flow_of_plan, flow_of_schedule, with_compute
from dyncp.simulate.results import AttentionTimes, Both, Simulated, run_flow
from dyncp.topology import Topology


def simulate_schedule(
    graph: BlockGraph,
    placement: Placement,
    schedule: Schedule,
    direction: Direction,
    topology: Topology,
    cost: CostModel,
    name: str = DEFAULT_MASK,
) -> AttentionTimes:
    """One direction of one attention layer with mask `name`, without lowering it to a plan."""
    topology.check_ranks(placement.num_ranks, "placement")
    return run_flow(flow_of_schedule(graph, placement, name, schedule, direction, cost), topology)


def simulate_schedules(
    graph: BlockGraph,
    placement: Placement,
    schedules: Mapping[str, tuple[Schedule, Schedule | None]],
    topology: Topology,
    cost: CostModel,
    *,
    layers: Mapping[str, float] | None = None,
    model: ModelConfig | None = None,
    local_multiple: int = 1,
) -> Simulated:
    """The whole step of a placement and its schedules (forward and backward per mask name).

    See `simulate_plan` for the options.
    """

    def run(name: str, direction: Direction) -> AttentionTimes | None:
        schedule = schedules[name][direction]
        if schedule is None:
            return None
        return simulate_schedule(graph, placement, schedule, direction, topology, cost, name)

    attention = {name: _both(run, name) for name in schedules}
    rows = rows_per_rank(graph, placement, local_multiple)
    return join_times(attention, rows, topology, cost, layers, model)


def rows_per_rank(graph: BlockGraph, placement: Placement, local_multiple: int) -> Int64:
    """Rows that every rank holds: its tokens, rounded up to a multiple."""
    tokens = np.bincount(placement.block_rank, graph.blocks.tokens, placement.num_ranks)
    tokens = tokens.clip(int(local_multiple > 1))
    return np.ceil(tokens / local_multiple).astype(np.int64) * local_multiple


def simulate_plan(
    plan: Plan,
    topology: Topology,
    cost: CostModel,
    *,
    layers: Mapping[str, float] | None = None,
    model: ModelConfig | None = None,
    compute: Mapping[tuple[str, Direction], Float64] | None = None,
) -> Simulated:
    """The whole step of a plan.

    `layers` says how many attention layers use each mask; by default each mask has its equal share
    of the model's layers (one layer without a model). With a model, the per-token work counts too.
    `compute` has measured seconds, float64[ranks, divisions], in place of those of the cost model.
    """
    topology.check_ranks(plan.num_ranks, "plan")
    part = plan.parts[0]

    def run(name: str, direction: Direction) -> AttentionTimes | None:
        if direction is Direction.BACKWARD and part.masks[name].backward is None:
            return None
        flow = flow_of_plan(plan, name, direction, cost)
        measured = (compute or {}).get((name, direction))
        return run_flow(flow if measured is None else with_compute(flow, measured), topology)

    attention = {name: _both(run, name) for name in part.masks}
    return join_times(attention, part.rows_per_rank, topology, cost, layers, model)


def join_times(
    attention: Mapping[str, Both],
    rows: Int64,
    topology: Topology,
    cost: CostModel,
    layers: Mapping[str, float] | None,
    model: ModelConfig | None,
) -> Simulated:
    """The step of masks that were simulated one by one; ranks hold `rows`."""
    counts = layers_by_mask(list(attention), layers, model)
    speed = topology.rank_speeds
    has_backward = any(backward is not None for _, backward in attention.values())
    per_token = _seconds_per_token(cost, model, has_backward)
    tiles = sum(
        counts[name] * times.flow.tile_seconds
        for name, both in attention.items()
        for times in both
        if times is not None
    )
    token_seconds = per_token * float((rows / speed).max())
    ideal = (tiles + per_token * float(rows.sum())) / float(speed.sum())
    return Simulated(attention, counts, token_seconds, ideal)


Run = Callable[[str, Direction], AttentionTimes | None]


def _both(run: Run, name: str) -> Both:
    forward = run(name, Direction.FORWARD)
    assert forward is not None
    return forward, run(name, Direction.BACKWARD)


def layers_by_mask(
    names: Sequence[str], layers: Mapping[str, float] | None, model: ModelConfig | None
) -> dict[str, float]:
    """How many layers use each mask; see `simulate_plan`."""
    if layers is None:
        each = 1 if model is None else model.layers / len(names)
        return dict.fromkeys(names, each)
    for name, count in layers.items():
        if name not in names:
            raise ValueError(f"layers names mask {name!r}; the plan has {', '.join(names)}")
        if count < 0:
            raise ValueError(f"layers[{name!r}] is {count}; numbers from 0 on are allowed")
    if not sum(layers.values()):
        raise ValueError(f"layers is {dict(layers)}; at least one layer is needed")
    return {name: layers.get(name, 0) for name in names}


def _seconds_per_token(cost: CostModel, model: ModelConfig | None, has_backward: bool) -> float:
    if model is None:
        return 0.0
    directions = [Direction.FORWARD, Direction.BACKWARD][: 1 + has_backward]
    return sum(model.seconds_per_token(cost.profile, direction) for direction in directions)
