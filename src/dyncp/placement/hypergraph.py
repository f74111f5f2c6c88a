"""Solver `hypergraph`: Mt-KaHyPar (extra `dyncp[hypergraph]`), repaired to the balance limits.

Vertex b is token block b together with its diagonal tile, if it has one; every other (query block,
key block) with work is a vertex of its own, over all masks and head groups. Block b has two
hyperedges, b for its query side and B + b for its key side, each with the vertex of the block and
those of the tiles on that side. Two blocks of a causal sequence:

    tiles   00            vertices  0: block 0, tile 00    edges  Q0: 0      K0: 0 2
            10 11                   1: block 1, tile 11           Q1: 1 2    K1: 1
                                    2: tile 10

An edge costs its weight for every part that it touches besides the first. The hypergraph is split
between the nodes, then between the ranks of each; moves of single tiles and blocks do the rest. The
library holds the GIL, so it runs in processes of its own (hypergraph_worker.py), which may crash or
hang without harm to the planner: one splits between nodes, one between the ranks of all nodes. A
few splits with different weights are each refined; the cheapest is kept.
"""

import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int64, frozen, starts_of
from dyncp.blocks import BlockGraph
from dyncp.placement import hypergraph_worker as worker
from dyncp.placement.bisection import tile_ranks
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.problem import Cells, Problem, border_price, find_cells, make_problem
from dyncp.placement.refine import Solution, make_state, refine, start_from
from dyncp.placement.solver import Solver
from dyncp.placement.static_layouts import deal_loads
from dyncp.placement.tile_moves import State
from dyncp.topology import Topology

# The library's weights are 32 bits wide, and so are its sums of weights: of all vertices, and of
# all edges times the parts they touch.
VERTEX_TOTAL, EDGE_TOTAL = 2**30, 2**22
# What the library accepts and can meet; repair has the last word on balance.
LEAST_IMBALANCE, MOST_IMBALANCE = 0.01, 1.0
# One round of repair makes a limited number of moves; thousands of tiles may need more.
MAX_ROUNDS = 8
# How much of a vertex's weight is work, the rest being tokens. The best of the three moves 9 %
# fewer bytes than the first alone, over 18 batches on 32 ranks (links alike).
WORK_SHARES = (1.0, 0.75, 0.5)
# From this many tiles on, one split has to do: 33,000 take 5 s.
MANY_TILES = 10_000
# Seconds that the library may take for all splits of a level.
TIMEOUT = 60.0


NAME = "hypergraph"


class SolverError(RuntimeError):
    """The solver gave no placement, for a reason that lies outside the batch."""

    def __init__(self, solver: str, reason: str) -> None:
        super().__init__(f"solver {solver!r} gave no placement: {reason}")


def check_installed() -> None:
    if find_spec("mtkahypar") is None:
        raise SolverError(
            NAME, "the package mtkahypar is not installed; pip install 'dyncp[hypergraph]'"
        )


# The hypergraph, and how it is split and refined.


class Hypergraph(NamedTuple):
    vertex_weight: Int64  # [vertices]
    edge_weight: Int64  # [edges]
    start: Int64  # [edges + 1] into pins
    pins: Int64  # vertices of each edge

    def restrict(self, vertices: Int64) -> "Hypergraph":
        """The part on `vertices`, numbered in this order; edges with one vertex left are dropped,
        since they cost nothing anywhere."""
        label = np.full(len(self.vertex_weight), -1)
        label[vertices] = np.arange(len(vertices))
        edge, pins = np.repeat(np.arange(len(self.edge_weight)), np.diff(self.start)), self.pins
        edge, pins = edge[label[pins] >= 0], label[pins[label[pins] >= 0]]
        size = np.bincount(edge, minlength=len(self.edge_weight))
        kept = size > 1
        return Hypergraph(
            self.vertex_weight[vertices],
            self.edge_weight[kept],
            starts_of(size[kept]),
            pins[kept[edge]],
        )


def build_hypergraph(problem: Problem, cells: Cells, work_share: float) -> Hypergraph:
    """Vertices weigh their share of the batch's work and of its tokens, in the ratio of
    `work_share` to the rest: there is one weight for two limits."""
    num_blocks, vertex, tokens = len(problem.tokens), vertex_of(problem, cells), problem.tokens
    blocks, off = np.arange(num_blocks), cells.q_block != cells.k_block
    edge = np.concatenate(
        [blocks, cells.q_block[off], blocks + num_blocks, cells.k_block[off] + num_blocks]
    )
    pins = np.concatenate([blocks, vertex[off], blocks, vertex[off]])
    all_work = float(problem.work.sum())
    work_share = work_share if all_work else 0.0
    work = np.bincount(vertex, problem.work[cells.cell], num_blocks + int(off.sum()))
    weight = (work * work_share / max(all_work, 1.0)).astype(np.float64)
    weight[:num_blocks] += (1 - work_share) * tokens / tokens.sum()
    return Hypergraph(
        _whole_numbers(weight, VERTEX_TOTAL),
        _whole_numbers(np.concatenate([problem.q_bytes, problem.kv_bytes]), EDGE_TOTAL),
        starts_of(np.bincount(edge, minlength=2 * num_blocks)),
        pins[np.argsort(edge, kind="stable")],
    )


def vertex_of(problem: Problem, cells: Cells) -> Int64:
    """The vertex of every cell with work."""
    off = cells.q_block != cells.k_block
    return np.where(off, len(problem.tokens) - 1 + np.cumsum(off), cells.q_block)


def _whole_numbers(weight: Float64, total: int) -> Int64:
    """Weights that add up to about `total`, each at least 1."""
    scale = total / float(weight.sum())
    return np.maximum(np.rint(weight * scale), 1).astype(np.int64)


def partition(
    hypergraphs: Sequence[Hypergraph], parts: int, imbalance: float, timeout: float
) -> list[Int64]:
    """The part of every vertex, by Mt-KaHyPar in a process that ends with its answer."""
    given = [[array.tolist() for array in hypergraph] for hypergraph in hypergraphs]
    words = [sys.executable, "-P", worker.__file__]
    try:
        done = subprocess.run(
            words,
            input=pickle.dumps((given, parts, imbalance, timeout)),
            stdout=subprocess.PIPE,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SolverError(NAME, f"no answer from its worker in {timeout:g} s") from None
    code = done.returncode
    if code:
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise SolverError(NAME, f"its worker process ended {how}")
    reply = pickle.loads(done.stdout)
    if isinstance(reply, str):
        raise SolverError(NAME, f"mtkahypar failed: {reply}")
    return [np.array(part, np.int64) for part in reply]


def split_along(
    hypergraphs: Sequence[Hypergraph],
    topology: Topology,
    tolerance: float,
    seed: int,
    timeout: float,
) -> list[Int64]:
    """The rank of every vertex of each hypergraph, all with the same vertices: nodes are split
    first, then the ranks of each. The library has no seed in its deterministic preset, so the seed
    chooses the order in which it sees the vertices.

    Nodes get half of the tolerance: on 18 batches with links alike, 0.05 and then 0.1 moved 3 %
    fewer bytes than 0.05 twice, and 6 % fewer than 0.01 and 0.03.
    """
    order = np.random.default_rng(seed).permutation(len(hypergraphs[0].vertex_weight))
    shuffled = [hypergraph.restrict(order) for hypergraph in hypergraphs]
    nodes = _split(shuffled, topology.nodes, tolerance / 2, timeout)
    own = [np.flatnonzero(node == m) for node in nodes for m in range(topology.nodes)]
    inside = [shuffled[i // topology.nodes].restrict(chosen) for i, chosen in enumerate(own)]
    parts = _split(inside, topology.ranks_per_node, tolerance, timeout)
    ranks = np.zeros((len(hypergraphs), len(order)), np.int64)
    for i, (chosen, part) in enumerate(zip(own, parts, strict=True)):
        number, node = divmod(i, topology.nodes)
        ranks[number, order[chosen]] = node * topology.ranks_per_node + part
    return list(ranks)


def _split(
    hypergraphs: Sequence[Hypergraph], parts: int, imbalance: float, timeout: float
) -> list[Int64]:
    """The part of every vertex. Where there is nothing to choose, the library is not asked."""
    found, asked = dict[int, Int64](), list[int]()
    for i, (weight, edges, *_) in enumerate(hypergraphs):
        if parts == 1 or len(weight) <= parts or not len(edges):
            found[i] = deal_loads(np.repeat(weight[:, None], 2, axis=1).astype(np.float64), parts)
        else:
            asked.append(i)
    if asked:
        allowed = min(max(imbalance, LEAST_IMBALANCE), MOST_IMBALANCE)
        given = [hypergraphs[i] for i in asked]
        found |= zip(asked, partition(given, parts, allowed, timeout), strict=True)
    return [found[i] for i in range(len(hypergraphs))]


def _refine(given: State, cells: Cells, vertex: Int64, vertex_rank: Int64) -> Solution:
    """Makes the ranks of vertices meet both limits, at few bytes, in several rounds; each starts
    with every diagonal tile where its block is."""
    tile_rank, block_rank = vertex_rank[vertex], vertex_rank[: len(given.tokens)].copy()
    diagonal, rounds = cells.q_block == cells.k_block, []
    for _ in range(MAX_ROUNDS):
        tile_rank = np.where(diagonal, block_rank[cells.q_block], tile_rank)
        rounds.append(refine(start_from(given, tile_rank, block_rank.copy()).state))
        state = rounds[-1].state
        tile_rank, block_rank = state.tile_rank, state.block_rank
        if (np.array([state.load.max(), state.held.max()]) <= state.caps * (1 + 1e-9)).all():
            break
    return min(rounds, key=lambda solution: solution.cost)


def place_hypergraph(
    graph: BlockGraph, topology: Topology, limits: Limits, seed: int, timeout: float = TIMEOUT
) -> Placement:
    """Raises SolverError when mtkahypar is not installed, fails, or takes longer than `timeout`."""
    check_installed()
    # Head groups are placed together, as one.
    problem = make_problem(graph)._replace(group_end=np.array([0.0, 1.0]))
    cells, tolerance = find_cells(problem), limits.tolerances
    vertex = vertex_of(problem, cells)
    caps, extra = problem.mean(topology.num_ranks) * (1 + tolerance), border_price(topology) - 1
    state = make_state(problem, cells, topology, caps, max(extra, 0.0))
    shares = WORK_SHARES if len(cells.cell) < MANY_TILES else WORK_SHARES[:1]
    hypergraphs = [build_hypergraph(problem, cells, share) for share in shares]
    splits = split_along(hypergraphs, topology, float(tolerance[0]), seed, timeout)
    solutions = [_refine(state, cells, vertex, ranks) for ranks in splits]
    best = min(solutions, key=lambda solution: solution.cost).state
    tile_rank = tile_ranks(graph, problem, cells, best.tile_rank)
    return Placement(topology.num_ranks, frozen(best.block_rank), tile_rank, NAME, static=False)


hypergraph = Solver(NAME, place_hypergraph)
