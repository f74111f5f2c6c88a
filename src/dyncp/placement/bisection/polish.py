"""Makes a bisected placement meet its limits, and cheaper where single moves can."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int32, Int64, starts_of
from dyncp.placement.bisection.anneal import anneal
from dyncp.placement.bisection.moves import State, count_pins, total_cost
from dyncp.placement.bisection.refine import improve
from dyncp.placement.bisection.regions import Cells, Problem, diagonal, find_cells
from dyncp.placement.bisection.repair import repair_tokens, repair_work
from dyncp.topology import Topology

MAX_REPAIRS = 400
MAX_PASSES = 3
# A rank's load beyond its cap costs this many times the bytes of a mean rank's load to repair.
REPAIR_FACTOR = 2.0
# While annealing, load beyond a cap costs this many times the bytes of a rank.
OVERLOAD = 3.0
CHANGING = ("tile_rank", "block_rank", "pins", "on_machine", "load", "held")


@dataclass(frozen=True, eq=False)
class Pins:
    """The tiles of all masks joined, by head group, and the hyperedges they belong to."""

    cells: Cells
    diagonal: Int64  # [blocks] index into problem.work
    edges: Int64  # [tiles, 2]: query-side edge, key-side edge
    start: Int64  # [edges + 1] into members
    members: Int64  # tiles of each edge
    span: Int64  # [blocks, 2]: first and end block of the sequence
    size: Float64  # [edges]
    work: Float64  # [tiles]


@dataclass(frozen=True, eq=False)
class Links:
    """The machine of every rank, and what a byte between machines costs beside one inside."""

    machine: Int64
    price: float


@dataclass(frozen=True, eq=False)
class Solution:
    """`cost` is in bytes, with a penalty that dwarfs them where a limit is missed."""

    state: State
    cost: float


def inter_price(topology: Topology) -> float:
    """How much longer a byte takes between machines than inside one."""
    if topology.machines == 1:
        return 1.0
    nic_share = topology.inter.bandwidth / topology.ranks_per_machine
    return max(1.0, topology.intra.bandwidth / nic_share)


def make_pins(problem: Problem) -> Pins:
    """Tiles are numbered by head group, then as their cells."""
    cells, groups, blocks = find_cells(problem), problem.num_groups, len(problem.tokens)
    share = np.diff(problem.group_end)
    group = np.repeat(np.arange(groups), len(cells.cell))
    edges = np.empty((groups * len(cells.cell), 2), np.int64)
    edges[:, 0] = np.tile(cells.q_block, groups) * groups + group
    edges[:, 1] = (np.tile(cells.k_block, groups) + blocks) * groups + group
    both = edges.T.ravel()
    order = np.argsort(both, kind="stable")
    start = starts_of(np.bincount(both, minlength=2 * blocks * groups))
    size = np.outer(np.append(problem.q_bytes, problem.kv_bytes), share).ravel()
    work = np.outer(share, problem.work[cells.cell]).ravel()
    members = order % max(len(edges), 1)
    first = problem.first_block
    span = np.repeat(np.stack([first[:-1], first[1:]], axis=1), np.diff(first), axis=0)
    return Pins(cells, diagonal(problem), edges, start, members, span, size, work)


def start_from(
    pins: Pins, problem: Problem, cell_rank: Int32, caps: Float64, links: Links
) -> Solution:
    """A bisected placement before repair; its cost estimates what repair will add."""
    ranks = len(links.machine)
    edges = len(pins.size)
    state = State(
        edges=pins.edges,
        start=pins.start,
        members=pins.members,
        size=pins.size,
        machine=links.machine,
        extra=links.price - 1.0,
        groups=problem.num_groups,
        work=pins.work,
        tokens=problem.tokens,
        span=pins.span,
        caps=caps,
        tile_rank=cell_rank[:, pins.cells.cell].ravel().astype(np.int64),
        block_rank=_owners(problem, cell_rank[:, pins.diagonal], ranks),
        pins=np.empty((edges, ranks), np.int32),
        on_machine=np.empty((edges, int(links.machine[-1]) + 1), np.int32),
        load=np.empty(ranks),
        held=np.empty(ranks),
    )
    cost = count_pins(state)
    over = (
        np.maximum(state.load / caps[0] - 1, 0).sum()
        + np.maximum(state.held / caps[1] - 1, 0).sum()
    )
    return Solution(state, cost + REPAIR_FACTOR * float(over) * max(cost, 1.0) / ranks)


def polish(solution: Solution, max_passes: int = MAX_PASSES) -> Solution:
    """Repairs missed limits, then moves tiles, groups of tiles and blocks while that gains; the
    state of the solution given is used up."""
    state = solution.state
    repair_tokens(state, MAX_REPAIRS)
    repair_work(state, MAX_REPAIRS)
    improve(state, max_passes)
    return Solution(state, cost_of(state))


@dataclass(frozen=True, slots=True)
class Annealing:
    """How many moves, and from which to which temperature, in mean sizes of a hyperedge."""

    max_moves: int
    hot: float
    cold: float


def anneal_solution(solution: Solution, annealing: Annealing, seed: int) -> Solution:
    """An annealed and polished copy."""
    old = solution.state
    copies = {name: getattr(old, name).copy() for name in CHANGING}
    state = old._replace(**copies)
    unit = float(state.size.mean())
    weight = OVERLOAD * (solution.cost / len(state.load) + 8 * unit)
    hot, cold = annealing.hot * unit, annealing.cold * unit
    anneal(state, annealing.max_moves, hot, cold, weight, seed)
    return polish(Solution(state, 0.0))


def cost_of(state: State) -> float:
    cost = total_cost(state.pins, state.on_machine, state.size, state.extra)
    over = [state.load.max() / state.caps[0], state.held.max() / state.caps[1]]
    missed = sum(max(0.0, float(share) - 1 - 1e-9) for share in over)
    return float(cost + missed * 1e6 * state.size.sum())


def _owners(problem: Problem, candidates: Int32, ranks: int) -> Int64:
    """A block lives where its diagonal tile went; where its head groups went to several ranks, on
    the one of them with fewest tokens so far."""
    owner: Int64 = candidates[0].astype(np.int64)
    several = (candidates != owner).any(axis=0)
    if not several.any():
        return owner
    held = np.bincount(owner[~several], problem.tokens[~several], ranks)
    for b in np.flatnonzero(several):
        owner[b] = candidates[np.argmin(held[candidates[:, b]]), b]
        held[owner[b]] += problem.tokens[b]
    return owner
