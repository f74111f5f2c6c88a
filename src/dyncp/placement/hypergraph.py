"""Solver `hypergraph`: Mt-KaHyPar (extra `dyncp[hypergraph]`), repaired to the balance limits.

Vertex b is token block b with its diagonal tile, if it has one. Every other pair of query block and
key block with work is a separate vertex; masks and head groups are summed. Block b has two
hyperedges, b for its query side and B + b for its key side; each joins the vertex of the block with
the tiles on that side. Two blocks of a causal sequence:

    tiles   00            vertices  0: block 0, tile 00    edges  Q0: 0      K0: 0 2
            10 11                   1: block 1, tile 11           Q1: 1 2    K1: 1
                                    2: tile 10

An edge costs its weight for every part that it touches except the first. The hypergraph is split
between the nodes, then between the ranks of each node; then single tiles and blocks are moved until
the limits hold. The library holds the GIL, so it runs in separate processes (hypergraph_worker.py),
which may crash or hang without harming the planner: one process splits between nodes, another
between the ranks of all nodes. A few splits with different weights are refined and the cheapest is
kept.
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

# The library has 32-bit weights. The sum over all vertices, and over all edges times the parts that
# they touch, must also fit into 32 bits.
VERTEX_TOTAL, EDGE_TOTAL = 2**30, 2**22
# Imbalances that the library accepts and can reach; repair then enforces the limits.
LEAST_IMBALANCE, MOST_IMBALANCE = 0.01, 1.0
# Rounds of repair: each makes a limited number of moves, and thousands of tiles may need more.
MAX_ROUNDS = 8
# Shares of work in a vertex's weight; the rest is tokens. The best of the three moves 9 % fewer
# bytes than the first alone, over 18 batches on 32 ranks (all links equal).
WORK_SHARES = (1.0, 0.75, 0.5)
# From this many tiles on, only the first share is tried: 33,000 tiles take 5 s.
MANY_TILES = 10_000
# Seconds that the library may take for all splits of a level.
TIMEOUT = 60.0
NAME = "hypergraph"


class SolverError(RuntimeError):
    """The solver gave no placement, and the batch is not the reason."""

    def __init__(self, solver: str, reason: str) -> None:
        super().__init__(f"solver {solver!r} gave no placement: {reason}")


# The hypergraph, and how it is split and refined.


class Hypergraph(NamedTuple):
    vertex_weight: Int64  # [vertices]
    edge_weight: Int64  # [edges]
    start: Int64  # [edges + 1] into pins
    pins: Int64  # vertices of each edge

    def restrict(self, vertices: Int64) -> "Hypergraph":
        """The sub-hypergraph of `vertices`, numbered in this order. Edges with fewer than two
        vertices left are dropped because they cost nothing."""
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
    """A vertex weighs `work_share` times its share of the batch's work, plus the rest times its
    share of the tokens, because the library has one weight for two limits."""
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
    """The part of every vertex of each hypergraph. Runs Mt-KaHyPar in a process that ends with its
    answer."""
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
    """The rank of every vertex of each hypergraph; all hypergraphs have the same vertices. Splits
    between nodes first, then between the ranks of each node. The library's deterministic preset
    ignores seeds, so `seed` shuffles the vertices.

    The split between nodes gets half of the tolerance: on 18 batches with equal links, 0.05 and
    then 0.1 moved 3 % fewer bytes than 0.05 twice, and 6 % fewer than 0.01 and 0.03.
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
    """The part of every vertex. Trivial splits do not call the library."""
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
    """Moves vertices in several rounds until both limits hold, at few bytes. Each round starts with
    every diagonal tile on its block's rank."""
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
    """Raises SolverError if mtkahypar is not installed, fails, or takes longer than `timeout`."""
    if find_spec("mtkahypar") is None:
        missing = "the package mtkahypar is not installed; pip install 'dyncp[hypergraph]'"
        raise SolverError(NAME, missing)
    # All head groups are placed together.
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
