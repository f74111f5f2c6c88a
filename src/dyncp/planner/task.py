"""Task: a batch to plan, with its cluster, model and costs. Places, schedules and simulates
candidates; plan_batch.py assembles the plans of the ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import process_time

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import AttentionShape, Batch, BlockGraph, Direction, build_graph
from dyncp.checks import instance_of
from dyncp.cost import PROFILES, CostModel, ModelConfig, profile_for_device, tell_profile
from dyncp.placement import (
    Balance,
    Limits,
    Placement,
    Prices,
    Solver,
    check_placement,
    improve,
    measure_balance,
)
from dyncp.plan import Layout, Plan, assemble_plan
from dyncp.planner.config import PlannerConfig
from dyncp.planner.memory import check_plan_memory
from dyncp.schedule import Pace, Schedule, build_schedule
from dyncp.simulate import (
    AttentionTimes,
    Simulated,
    join_times,
    layers_by_mask,
    rows_per_rank,
    simulate_schedule,
    simulate_schedules,
)
from dyncp.topology import Topology

# Most divisions per direction, unless the config says otherwise.
DIVISIONS = 4
CHANGE = "pass topology=preset(name, nodes, ranks), or cost=CostModel(profile, shape), for another"

# A mask and a direction, which are scheduled and simulated separately.
Part = tuple[str, Direction]


@dataclass(frozen=True, eq=False)
class PartRun:
    """A part's schedule for at most `divisions` divisions, its simulation, and the CPU seconds that
    scheduling took."""

    divisions: int
    schedule: Schedule
    times: AttentionTimes
    cpu_seconds: float

    @property
    def input_steps(self) -> int:
        """Number of divisions that wait for inputs."""
        feeds = self.schedule.phase_feeds
        return len(np.unique(feeds[feeds < self.schedule.num_divisions]))


@dataclass(frozen=True, eq=False)
class Placed:
    """A batch cut and placed. `cpu_seconds` has the CPU seconds of each stage."""

    graph: BlockGraph
    placement: Placement
    balance: Balance
    cpu_seconds: Mapping[str, float]

    @property
    def num_tiles(self) -> int:
        return sum(map(len, self.graph.tiles.values()))


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placed batch with its schedules and its simulated step."""

    placed: Placed
    runs: Mapping[Part, PartRun]
    simulated: Simulated

    @property
    def graph(self) -> BlockGraph:
        return self.placed.graph

    @property
    def placement(self) -> Placement:
        return self.placed.placement

    @property
    def balance(self) -> Balance:
        return self.placed.balance

    @property
    def schedules(self) -> dict[str, tuple[Schedule, Schedule | None]]:
        """Forward and backward schedules by mask; backward is None in forward-only plans."""
        found = {}
        for name in self.graph.tiles:
            back = self.runs.get((name, Direction.BACKWARD))
            forward = self.runs[name, Direction.FORWARD].schedule
            found[name] = forward, None if back is None else back.schedule
        return found

    @property
    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds of each stage."""
        scheduling = sum(run.cpu_seconds for run in self.runs.values())
        return dict(self.placed.cpu_seconds) | {"schedule": scheduling}

    @property
    def key(self) -> tuple[float, float]:
        """How far it misses the limits, then its seconds: the smallest key is the best."""
        return self.balance.missed, self.simulated.step_seconds

    def assemble(self, layout: Layout, reasons: str = "") -> Plan:
        """Assembles the plans of all ranks."""
        parts = self.graph, self.placement, self.schedules, self.balance
        return assemble_plan(*parts, layout, reasons)


@dataclass(frozen=True, eq=False)
class Task:
    """Everything that determines a plan; `Task.of` checks it and fills in defaults."""

    batch: Batch
    topology: Topology
    shape: AttentionShape
    config: PlannerConfig
    cost: CostModel
    model: ModelConfig | None = None
    # Graphs built so far, by block sizes and number of head groups.
    _graphs: dict[tuple[bytes, int], BlockGraph] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        batch: Batch,
        topology: Topology,
        shape: AttentionShape | None = None,
        config: PlannerConfig | None = None,
        cost: CostModel | None = None,
        model: ModelConfig | None = None,
    ) -> "Task":
        """A task with defaults filled in: costs are those of the profile with the topology's name
        (p4de's if there is none). `max_tokens_per_rank` becomes a token limit of this batch."""
        shape = AttentionShape.assumed() if shape is None else shape
        config = PlannerConfig() if config is None else config
        for name, value, kind in (
            ("batch", batch, Batch),
            ("topology", topology, Topology),
            ("shape", shape, AttentionShape),
            ("planner", config, PlannerConfig),
        ):
            instance_of(name, value, kind, kind.__name__)
        config = replace(config, limits=_limits(batch, topology, config))
        if config.block_size is not None:  # otherwise solvers choose, and one may need less
            sizes = np.full(len(batch.lengths), config.block_size, np.int64)
            check_plan_memory(batch, sizes, config.head_groups or 1, topology.num_ranks)
        return Task(batch, topology, shape, config, cost or default_cost(topology, shape), model)

    @cached_property
    def fewest_rows(self) -> dict[Part, int]:
        """Rows that calls must load, by part: forward, query rows that attend any keys; backward,
        key rows in the first range of any query row."""
        found = dict[Part, int]()
        for name, of_sequences in self.batch.masks.items():
            starts = np.repeat(self.batch.offsets[:-1], self.batch.lengths)
            first = np.concatenate([mask.ranges[:, 0] for mask in of_sequences]) + starts[:, None]
            begin, end = (np.bincount(x, minlength=len(first) + 1) for x in first.T)
            found[name, Direction.FORWARD] = int((first[:, 0] < first[:, 1]).sum())
            found[name, Direction.BACKWARD] = int((np.cumsum(begin - end) > 0).sum())
        return found

    @property
    def layers(self) -> dict[str, float]:
        """Number of layers that use each mask."""
        return layers_by_mask(list(self.batch.masks), self.config.layers, self.model)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions that are planned."""
        return (Direction.FORWARD,) if self.config.forward_only else tuple(Direction)

    @property
    def parts(self) -> list[Part]:
        """Masks and directions to schedule and simulate, the longest first."""
        return [(name, way) for way in reversed(self.directions) for name in self.batch.masks]

    def block_sizes(self, solver: Solver) -> Int64:
        """Block size of every sequence: the config's if set, otherwise the solver's."""
        size, lengths = self.config.block_size, self.batch.lengths
        if size is None:
            return solver.block_sizes(lengths, self.topology.num_ranks)
        return np.full(len(lengths), size, np.int64)

    def place(self, solver: Solver, limits: Limits | None = None) -> Placed:
        """Cuts and places the batch, by default within the config's limits. The balance is always
        measured against the config's limits. A solver's own `head_groups` overrides the config's.
        """
        marks, config, topology = [process_time()], self.config, self.topology
        solver = solver.fitted(self.shape, topology)
        graph = self._graph(self.block_sizes(solver), solver.head_groups or config.head_groups or 1)
        marks.append(process_time())
        placement = solver.place(graph, topology, limits or config.limits, config.seed)
        check_placement(graph, placement)
        balance = measure_balance(graph, placement, config.limits, topology.rank_speeds)
        marks.append(process_time())
        seconds = dict(zip(("blocks", "placement"), np.diff(marks).tolist(), strict=True))
        return Placed(graph, placement, balance, seconds)

    def _graph(self, sizes: Int64, head_groups: int) -> BlockGraph:
        key = (sizes.tobytes(), head_groups)
        if key not in self._graphs:
            check_plan_memory(self.batch, sizes, head_groups, self.topology.num_ranks)
            self._graphs[key] = build_graph(self.batch, self.shape, sizes, head_groups)
        return self._graphs[key]

    def improve(
        self, placed: Placed, worth: float = 1.0, beside: Candidate | None = None
    ) -> Placed | None:
        """Moves blocks while that shortens the estimated step. None if no move does, or if the
        estimate is below `worth` times the computation. Tiles are priced with their share of what
        calls cost in the candidate `beside`."""
        start, graph, limits = process_time(), placed.graph, self.config.limits
        prices = self._prices(graph, beside)
        found = improve(graph, placed.placement, self.topology, limits, prices, worth)
        if found is None:
            return None
        balance = measure_balance(graph, found, limits, self.topology.rank_speeds)
        seconds = dict(placed.cpu_seconds)
        seconds["placement"] += process_time() - start
        return Placed(graph, found, balance, seconds)

    def _prices(self, graph: BlockGraph, beside: Candidate | None) -> Prices:
        cost, planned, runs = self.cost, self.directions, {} if beside is None else beside.runs

        def of_tiles(name: str, direction: Direction) -> Float64:
            tiles = cost.graph_tile_seconds(graph, name, direction)
            run = runs.get((name, direction))
            calls = 1.0 if run is None else run.times.compute_over_tiles
            return tiles * (calls * (direction in planned))

        seconds = {
            name: np.column_stack([of_tiles(name, direction) for direction in Direction])
            for name in graph.tiles
        }
        return Prices(seconds, self.layers, self.token_seconds, forward_only=len(planned) == 1)

    @property
    def token_seconds(self) -> float:
        """Seconds that one token takes outside attention, over all planned directions."""
        if self.model is None:
            return 0.0
        profile = self.cost.profile
        return sum(self.model.seconds_per_token(profile, d) for d in self.directions)

    def follow(self, placed: Placed) -> Candidate:
        """Schedules and simulates all parts of a placement."""
        return self.join(placed, {part: self.run_part(placed, part) for part in self.parts})

    def simulate(self, candidate: Candidate) -> Simulated:
        """Simulates a candidate, also one of another task, on this cluster and by these costs."""
        return simulate_schedules(
            candidate.graph,
            candidate.placement,
            candidate.schedules,
            self.topology,
            self.cost,
            layers=self.config.layers,
            model=self.model,
            local_multiple=self.config.layout.local_multiple,
        )

    def run_part(self, placed: Placed, part: Part, divisions: int | None = None) -> PartRun:
        """Schedules and simulates one mask and direction."""
        start, (graph, placement) = process_time(), (placed.graph, placed.placement)
        steps = self.config.divisions or divisions or DIVISIONS
        pace = Pace(self.topology, self.cost)
        schedule = build_schedule(graph, placement, *part, steps, pace)
        spent, (name, direction) = process_time() - start, part
        times = simulate_schedule(
            graph, placement, schedule, direction, self.topology, self.cost, name
        )
        return PartRun(steps, schedule, times, spent)

    def join(self, placed: Placed, runs: Mapping[Part, PartRun]) -> Candidate:
        """Joins a placement and the schedules of all its parts to a candidate."""
        attention = {
            name: tuple(runs[name, direction].times for direction in self.directions)
            for name in placed.graph.tiles
        }
        rows = rows_per_rank(placed.graph, placed.placement, self.config.layout.local_multiple)
        model = self.model
        step = join_times(attention, rows, self.topology, self.layers, self.token_seconds, model)
        return Candidate(placed, runs, step)


def default_cost(topology: Topology, shape: AttentionShape) -> CostModel:
    """Costs of the profile with the topology's name. Bare topologies have p4de's links and get its
    costs; the log says so if there is more than one rank."""
    if topology.name in PROFILES:
        return CostModel(PROFILES[topology.name], shape)
    if topology.num_ranks > 1:
        tell_profile(None, CHANGE)
    return CostModel(profile_for_device(None), shape)


def _limits(batch: Batch, topology: Topology, config: PlannerConfig) -> Limits:
    limits, most = config.limits, config.max_tokens_per_rank
    if most is None:
        return limits
    mean = batch.num_tokens / topology.num_ranks
    if most < mean:
        raise ValueError(
            f"max_tokens_per_rank is {most}, but {batch.num_tokens:,} tokens on "
            f"{topology.num_ranks} ranks are {mean:,.1f} each; use smaller batches or more ranks"
        )
    tolerance = most / mean - 1
    if limits.token_tolerance is not None:
        tolerance = min(tolerance, limits.token_tolerance)
    return replace(limits, token_tolerance=tolerance)
