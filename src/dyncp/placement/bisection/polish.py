"""Makes a bisected placement meet its limits, and cheaper where single moves can."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.placement.bisection.problem import Problem
from dyncp.placement.bisection.refine import (
    State,
    count_pins,
    improve,
    repair_tokens,
    repair_work,
)

MAX_REPAIRS = 400
MAX_PASSES = 4


@dataclass(frozen=True, eq=False)
class Pins:
    """The tiles of all masks and head groups joined, and the hyperedges they belong to."""

    cell: Int64  # [tiles] index into problem.work
    edges: Int64  # [tiles, 2]: query-side edge, key-side edge
    start: Int64  # [edges + 1] into members
    members: Int64  # tiles of each edge


@dataclass(frozen=True, eq=False)
class Solution:
    """`cost` is in bytes, with a penalty that dwarfs them where a limit is missed."""

    tile_rank: Int64
    block_rank: Int64
    cost: float


@dataclass(frozen=True, eq=False)
class Links:
    """The machine of every rank, and what a byte between machines costs beside one inside."""

    machine: Int64
    price: float


def make_pins(problem: Problem) -> Pins:
    num_blocks = len(problem.tokens)
    cell = np.flatnonzero(problem.work)
    sequence = np.searchsorted(problem.work_start, cell, side="right") - 1
    within, stride = cell - problem.work_start[sequence], np.diff(problem.first_block)[sequence]
    q_block = problem.first_block[sequence] + within // stride
    k_block = problem.first_block[sequence] + within % stride
    edges = np.stack([q_block, k_block + num_blocks], axis=1)
    both = edges.T.ravel()
    order = np.argsort(both, kind="stable")
    start = np.searchsorted(both[order], np.arange(2 * num_blocks + 1))
    return Pins(cell, edges, start, order % max(len(cell), 1))


def polish(pins: Pins, problem: Problem, cell_rank: Int64, caps: Float64, links: Links) -> Solution:
    """Repairs missed limits, then moves tiles, groups of tiles and blocks while that gains."""
    ranks = len(links.machine)
    state = State(
        edges=pins.edges,
        start=pins.start,
        members=pins.members,
        size=np.concatenate([problem.q_bytes, problem.kv_bytes]),
        machine=links.machine,
        price=links.price,
        work=problem.work[pins.cell],
        tokens=problem.tokens,
        work_cap=float(caps[0]),
        token_cap=float(caps[1]),
        tile_rank=cell_rank[pins.cell],
        block_rank=_owners(problem, cell_rank),
        pins=np.zeros((2 * len(problem.tokens), ranks), np.int32),
        cost=np.zeros((2 * len(problem.tokens), ranks)),
        load=np.zeros(ranks),
        held=np.zeros(ranks),
    )
    count_pins(state)
    repair_tokens(state, MAX_REPAIRS)
    repair_work(state, MAX_REPAIRS)
    improve(state, MAX_PASSES)
    return Solution(state.tile_rank, state.block_rank, _cost(state))


def _cost(state: State) -> float:
    touched = np.where(state.pins > 0, state.cost, 0.0)
    blocks, owner = np.arange(len(state.block_rank)), state.block_rank
    at_home = touched[blocks, owner] + touched[blocks + len(owner), owner]
    over = [state.load.max() / state.work_cap, state.held.max() / state.token_cap]
    missed = sum(max(0.0, float(share) - 1 - 1e-9) for share in over)
    return float(touched.sum() - at_home.sum()) + missed * 1e6 * float(state.size.sum())


def _owners(problem: Problem, cell_rank: Int64) -> Int64:
    """A token block lives where its diagonal cell went."""
    stride = np.diff(problem.first_block)
    sequence = np.repeat(np.arange(len(stride)), stride)
    within = np.arange(len(problem.tokens)) - problem.first_block[sequence]
    owner: Int64 = cell_rank[problem.work_start[sequence] + within * (stride[sequence] + 1)]
    return owner
