"""Candidates: a batch placed, then scheduled, but not yet lowered to per-rank plans."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import process_time

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import AttentionShape, Batch, BlockGraph, Direction, build_graph
from dyncp.placement import Balance, Limits, Placement, Solver, check_placement, measure_balance
from dyncp.plan import Layout, Plan, assemble_plan
from dyncp.schedule import BUILDERS, Pace, Schedule
from dyncp.simulate import AttentionTimes
from dyncp.topology import Topology

Part = tuple[str, Direction]


# Parts of a candidate: one mask and direction each, scheduled and simulated by itself.


@dataclass(frozen=True, eq=False)
class PartRun:
    """A part's schedule in at most so many steps, its simulation, and what scheduling took."""

    divisions: int
    schedule: Schedule
    times: AttentionTimes
    cpu_seconds: float

    @property
    def input_steps(self) -> int:
        """Divisions that wait for inputs."""
        feeds = self.schedule.phase_feeds
        return len(np.unique(feeds[feeds < self.schedule.num_divisions]))


Runs = Mapping[Part, PartRun]


# Most steps in which inputs come, where the planner is not told.
DIVISIONS = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """How a batch is cut: `block_size` None leaves it to the solver."""

    block_size: int | None = None
    head_groups: int = 1


# By block sizes and number of head groups.
Graphs = dict[tuple[bytes, int], BlockGraph]


@dataclass(frozen=True, eq=False)
class Placed:
    """A batch cut and placed. `cpu_seconds` says what each stage took."""

    graph: BlockGraph
    placement: Placement
    balance: Balance
    cpu_seconds: Mapping[str, float]

    @property
    def num_tiles(self) -> int:
        return sum(map(len, self.graph.tiles.values()))

    def schedule(
        self, divisions: int | None, pace: Pace, *, forward_only: bool = False
    ) -> "Candidate":
        start = process_time()
        build, schedules = BUILDERS[self.placement.pattern], {}
        for name in self.graph.tiles:
            forward, backward = (
                None
                if direction is Direction.BACKWARD and forward_only
                else build(
                    self.graph, self.placement, name, direction, divisions or DIVISIONS, pace
                )
                for direction in Direction
            )
            assert forward is not None
            schedules[name] = (forward, backward)
        seconds = dict(self.cpu_seconds) | {"schedule": process_time() - start}
        return Candidate(self, schedules, seconds)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placed batch with its schedules: what simulation needs to know of a plan."""

    placed: Placed
    schedules: Mapping[str, tuple[Schedule, Schedule | None]]
    cpu_seconds: Mapping[str, float]

    @property
    def graph(self) -> BlockGraph:
        return self.placed.graph

    @property
    def placement(self) -> Placement:
        return self.placed.placement

    @property
    def balance(self) -> Balance:
        return self.placed.balance

    def lower(self, layout: Layout) -> Plan:
        return assemble_plan(self.graph, self.placement, self.schedules, self.balance, layout)


def place_batch(
    solver: Solver,
    batch: Batch,
    topology: Topology,
    shape: AttentionShape,
    limits: Limits,
    *,
    cut: Cut | None = None,
    seed: int = 0,
    graphs: Graphs | None = None,
) -> Placed:
    """Cuts and places a batch. A method that splits heads says itself into how many groups.
    `graphs` remembers how the batch was cut before."""
    cut, graphs = cut or Cut(), {} if graphs is None else graphs
    marks = [process_time()]
    solver = solver.fitted(shape, topology)
    sizes = choose_sizes(batch, topology, solver, cut)
    head_groups = cut.head_groups if solver.head_groups is None else solver.head_groups
    key = (sizes.tobytes(), head_groups)
    if key not in graphs:
        graphs[key] = build_graph(batch, shape, sizes, head_groups)
    graph = graphs[key]
    marks.append(process_time())
    placement = solver.place(graph, topology, limits, seed)
    check_placement(graph, placement)
    balance = measure_balance(graph, placement, limits, topology.rank_speeds)
    marks.append(process_time())
    seconds = dict(zip(("blocks", "placement"), np.diff(marks).tolist(), strict=True))
    return Placed(graph, placement, balance, seconds)


def choose_sizes(batch: Batch, topology: Topology, solver: Solver, cut: Cut) -> Int64:
    """Block size of every sequence."""
    if cut.block_size is None:
        return solver.block_sizes(batch.lengths, topology.num_ranks)
    return np.full(len(batch.lengths), cut.block_size, np.int64)
