"""Homes: every tile runs where one of its two blocks lives, its home.

Usually that is the query block, so that only keys travel. A row that is too heavy for one rank (the
last rows of causal blockwise attend everything) is computed by the owners of its keys instead; then
its queries travel to them and partial outputs come back.
"""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64, starts_of
from dyncp.placement.bisection.regions import HEAVY, Cells, Problem, find_cells
from dyncp.placement.bisection.regions import fold as fold_cells


class Homes(NamedTuple):
    """The cells of `Problem.work` that have work, ordered: their index, query and key block, and
    whether the key block is home."""

    cell: Int64
    q_block: Int64
    k_block: Int64
    by_key: Bool


def find_homes(problem: Problem, num_ranks: int) -> Homes:
    cells = find_cells(problem)
    by_row = np.bincount(cells.q_block, problem.work[cells.cell], len(problem.tokens))
    heavy = by_row > HEAVY * problem.work.sum() / num_ranks
    return Homes(*cells, heavy[cells.q_block])


def fold(problem: Problem, homes: Homes) -> Problem:
    """The problem with the work of every cell in the row of its home: cells whose home is the key
    block add to that block's diagonal."""
    return fold_cells(problem, Cells(homes.cell, homes.q_block, homes.k_block), homes.by_key)


class Needs(NamedTuple):
    """What the tiles of each home block need besides it: edges of other blocks, key sides 0 to
    B - 1 and query sides B to 2B - 1, with the bytes that each costs per rank."""

    start: Int64  # [blocks + 1] into edges
    edges: Int64
    size: Float64  # [2 × blocks]
    work: Float64  # [blocks] of the tiles


def find_needs(problem: Problem, homes: Homes) -> Needs:
    blocks = len(problem.tokens)
    home = np.where(homes.by_key, homes.k_block, homes.q_block)
    edge = np.where(homes.by_key, homes.q_block + blocks, homes.k_block)
    foreign = np.where(homes.by_key, homes.q_block, homes.k_block) != home
    order = np.argsort(home[foreign], kind="stable")
    counts = np.bincount(home[foreign], minlength=blocks)
    return Needs(
        starts_of(counts),
        edge[foreign][order],
        np.concatenate([problem.kv_bytes, problem.q_bytes]),
        np.bincount(home, problem.work[homes.cell], blocks).astype(np.float64),
    )
