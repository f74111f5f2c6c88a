"""Entry points of the simulator and their results: AttentionTimes for one direction of a layer,
Simulated for a whole step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import DEFAULT_MASK, BlockGraph, Direction
from dyncp.cost import CostModel, ModelConfig
from dyncp.placement import Placement
from dyncp.plan import Op, Plan
from dyncp.schedule import Schedule
from dyncp.simulate.events import Records, make_state, run_ordered
from dyncp.simulate.flow import Flow, flow_of_plan, flow_of_schedule
from dyncp.simulate.shared import run_shared
from dyncp.topology import Topology


@dataclass(frozen=True, eq=False)
class AttentionTimes:
    """Times in seconds since all ranks started together.

    `steps` (instructions), `messages` and `ports` are records with their times; events.py describes
    their fields and the numbering of ports.
    """

    flow: Flow
    topology: Topology
    steps: Records
    messages: Records
    ports: Records

    @cached_property
    def step_rank(self) -> Int64:
        """Rank of every instruction."""
        return self.flow.programs.rank

    @cached_property
    def rank_seconds(self) -> Float64:
        """When every rank finishes."""
        done = np.zeros(self.flow.num_ranks)
        np.maximum.at(done, self.step_rank, self.steps["end"])
        return done

    @cached_property
    def rank_compute_seconds(self) -> Float64:
        """Time every rank spends in kernels."""
        spent = self.steps["end"] - self.steps["begin"]
        return self._per_rank(np.where(self.flow.programs.op == Op.COMPUTE, spent, 0))

    @cached_property
    def rank_waiting_seconds(self) -> Float64:
        """Time every rank waits for messages."""
        return self._per_rank(self.steps["begin"] - self.steps["reached"])

    @cached_property
    def rank_host_seconds(self) -> Float64:
        """Time every rank's device is idle because the host has not issued the next instruction."""
        before = np.concatenate([np.zeros(1), self.steps["end"][:-1]])[: len(self.steps)]
        before[self.flow.programs.first[:-1][np.diff(self.flow.programs.first) > 0]] = 0.0
        return self._per_rank(self.steps["reached"] - before)

    def _per_rank(self, step_seconds: Float64) -> Float64:
        total = np.bincount(self.step_rank, step_seconds, self.flow.num_ranks)
        return total.astype(np.float64)

    @property
    def seconds(self) -> float:
        """When the last rank finishes."""
        return float(self.rank_seconds.max())

    @property
    def compute_seconds(self) -> float:
        """The largest kernel time of any rank."""
        return float(self.rank_compute_seconds.max())

    @property
    def compute_over_tiles(self) -> float:
        """Kernel seconds of all ranks over those of their tiles: what calls and rows add."""
        tiles, speed = self.flow.tile_seconds, self.topology.rank_speeds
        computed = float((self.rank_compute_seconds * speed).sum())
        return max(1.0, computed / tiles) if tiles else 1.0

    @property
    def exposed_seconds(self) -> float:
        """Time that kernels do not hide: the whole time minus the largest kernel time of any rank.
        That is waiting for messages and for the host, and row work."""
        return self.seconds - self.compute_seconds


def run_flow(flow: Flow, topology: Topology) -> AttentionTimes:
    topology.check_ranks(flow.num_ranks, "plan")
    state = make_state(flow, topology)
    run = run_ordered if topology.ordered_phases else run_shared
    run(state)
    stuck = np.flatnonzero(state.ranks["next"] < state.ranks["last"])
    if len(stuck):
        step = state.steps[state.ranks["next"][stuck[0]]]
        raise ValueError(
            f"ranks {stuck.tolist()} never finish; rank {stuck[0]} waits for phase "
            f"{step['argument']}: the order of its phases has a cycle"
        )
    return AttentionTimes(flow, topology, state.steps, state.messages, state.ports)


# Forward and, unless a plan is forward-only, backward.
Both = tuple[AttentionTimes, ...]


@dataclass(frozen=True, eq=False)
class Simulated:
    """Seconds of a step; all links and kernels by the cost model.

    `attention` has the forward and backward times of one layer by mask name, `layers` the number of
    layers with that mask. `token_seconds` is the per-token work of the fullest rank, forward and
    backward; 0 without a model. `traffic_seconds` is the time of gradients and weights on the links
    that nothing hides. `ideal_seconds` is the step without communication and call
    overhead, and with all work spread evenly.
    """

    attention: Mapping[str, Both]
    layers: Mapping[str, float]
    token_seconds: float
    ideal_seconds: float
    traffic_seconds: float = 0.0

    @property
    def num_layers(self) -> float:
        return sum(self.layers.values())

    @property
    def forward_seconds(self) -> float:
        """Forward seconds of one attention layer; the mean if layers have different masks."""
        return self._per_layer(0, "seconds")

    @property
    def backward_seconds(self) -> float:
        """Backward seconds, like `forward_seconds`; 0 in forward-only plans."""
        return self._per_layer(1, "seconds")

    @property
    def layer_seconds(self) -> float:
        """Forward and backward seconds of one attention layer."""
        return self.forward_seconds + self.backward_seconds

    @property
    def exposed_seconds(self) -> float:
        """Exposed seconds of one attention layer, forward and backward together."""
        return self._per_layer(0, "exposed_seconds") + self._per_layer(1, "exposed_seconds")

    @property
    def attention_seconds(self) -> float:
        """Forward and backward seconds of all attention layers."""
        return self.num_layers * self.layer_seconds

    @property
    def step_seconds(self) -> float:
        """Forward and backward seconds of all attention layers and of the per-token work, and
        the traffic of gradients and weights that they don't hide."""
        return self.attention_seconds + self.token_seconds + self.traffic_seconds

    def runs(self) -> Iterator[tuple[str, AttentionTimes]]:
        """Name and times of every simulated mask and direction, forward first."""
        for side, direction in enumerate(("forward", "backward")):
            for name, both in self.attention.items():
                if side < len(both):
                    yield f"{name} {direction}", both[side]

    def _per_layer(self, side: int, field: str) -> float:
        total = sum(
            self.layers[name] * float(getattr(both[side], field))
            for name, both in self.attention.items()
            if side < len(both)
        )
        return total / self.num_layers


def simulate_schedule(
    graph: BlockGraph,
    placement: Placement,
    schedule: Schedule,
    direction: Direction,
    topology: Topology,
    cost: CostModel,
    name: str = DEFAULT_MASK,
) -> AttentionTimes:
    """Simulates one direction of one attention layer with mask `name`, before a plan is
    assembled."""
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
    """Simulates the whole step of a placement with its schedules (forward and backward by mask
    name). See `simulate_plan` for the options."""

    attention = {
        name: tuple(
            simulate_schedule(graph, placement, schedule, direction, topology, cost, name)
            for direction, schedule in zip(Direction, both, strict=True)
            if schedule is not None
        )
        for name, both in schedules.items()
    }
    rows = rows_per_rank(graph, placement, local_multiple)
    return _make_step(attention, rows, topology, cost, layers, model)


def rows_per_rank(graph: BlockGraph, placement: Placement, local_multiple: int) -> Int64:
    """Rows that every rank holds: its tokens, rounded up to a multiple of `local_multiple`."""
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
    """Simulates the whole step of a plan.

    `layers` is the number of attention layers by mask name; by default the masks share the model's
    layers equally (one layer each without a model). With a model, the step includes per-token work.
    `compute` has measured seconds, float64[ranks, divisions], that replace the cost model's.
    """
    topology.check_ranks(plan.num_ranks, "plan")
    part, attention = plan.parts[0], dict[str, Both]()
    for name, mask in part.masks.items():
        flows = []
        for direction in list(Direction)[: 1 if mask.backward is None else 2]:
            flow = flow_of_plan(plan, name, direction, cost)
            measured = (compute or {}).get((name, direction))
            flows.append(flow if measured is None else flow.with_compute(measured))
        attention[name] = tuple(run_flow(flow, topology) for flow in flows)
    return _make_step(attention, part.rows_per_rank, topology, cost, layers, model)


def _make_step(
    attention: Mapping[str, Both],
    rows: Int64,
    topology: Topology,
    cost: CostModel,
    layers: Mapping[str, float] | None,
    model: ModelConfig | None,
) -> Simulated:
    per_token = 0.0
    if model is not None:
        directions = list(Direction)[: max(map(len, attention.values()))]
        per_token = sum(model.seconds_per_token(cost.profile, d) for d in directions)
    layers = layers_by_mask(list(attention), layers, model)
    return join_times(attention, rows, topology, layers, per_token, model)


def join_times(
    attention: Mapping[str, Both],
    rows: Int64,
    topology: Topology,
    layers: Mapping[str, float],
    token_seconds: float,
    model: ModelConfig | None = None,
) -> Simulated:
    """Joins the times of all masks to a step. Every rank holds `rows` rows, each of which takes
    `token_seconds` outside attention. The traffic of `model` is added."""
    speed = topology.rank_speeds
    tiles = sum(
        layers[name] * times.flow.tile_seconds for name, both in attention.items() for times in both
    )
    fullest = token_seconds * float((rows / speed).max())
    ideal = (tiles + token_seconds * float(rows.sum())) / float(speed.sum())
    step = Simulated(attention, layers, fullest, ideal)
    return step if model is None else replace(step, traffic_seconds=_exposed(step, topology, model))


def _exposed(step: Simulated, topology: Topology, model: ModelConfig) -> float:
    """Seconds of gradients and weights that the step does not hide: while attention's messages
    keep the busiest link busy, nothing else travels there."""
    traffic = model.traffic_seconds(topology)
    if not traffic or model.traffic is None or not model.traffic.overlaps:
        return traffic
    first = 2 * topology.num_ranks if topology.nodes > 1 else 0
    busy = sum(
        step.layers[name] * float((times.ports["moved"] / times.ports["bandwidth"])[first:].max())
        for name, both in step.attention.items()
        for times in both
    )
    return max(0.0, traffic - (step.step_seconds - busy))


def layers_by_mask(
    names: Sequence[str], layers: Mapping[str, float] | None, model: ModelConfig | None
) -> dict[str, float]:
    """Number of layers by mask; see `simulate_plan`."""
    if layers is None:
        each = 1 if model is None else model.layers / len(names)
        return dict.fromkeys(names, each)
    for name, count in layers.items():
        if name not in names:
            raise ValueError(f"layers names mask {name!r}; the plan has {', '.join(names)}")
        if count < 0:
            raise ValueError(f"layers[{name!r}] is {count}; it must not be negative")
    if not sum(layers.values()):
        raise ValueError(f"layers is {dict(layers)}; at least one layer is needed")
    return {name: layers.get(name, 0) for name in names}
