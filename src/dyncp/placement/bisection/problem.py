"""The batch as the bisection solver sees it: one work matrix per sequence, sizes per block."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Float64, Int64, starts_of
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Payload

Q_KINDS = [kind for side in (Q_INPUT, Q_RESULT) for kind in side.values()]
KV_KINDS = [Payload.KV, Payload.KV, Payload.DKV]  # forward, backward, gradient


class Problem(NamedTuple):
    """Blocks are numbered over the whole batch. `work` holds the blocks × blocks matrix of every
    sequence, one after the other (sequence s from `work_start[s]`), over all masks and head
    groups; `q_bytes` and `kv_bytes` are what a block's hyperedges cost per further rank, in both
    directions together. Head group g has the share `group_end[g + 1] - group_end[g]` of all."""

    work: Float64
    work_start: Int64
    first_block: Int64
    tokens: Float64
    q_bytes: Float64
    kv_bytes: Float64
    group_end: Float64

    @property
    def num_groups(self) -> int:
        return len(self.group_end) - 1


class Cells(NamedTuple):
    """The cells of `Problem.work` that have work, ordered: their index, query and key block."""

    cell: Int64
    q_block: Int64
    k_block: Int64


def make_problem(graph: BlockGraph) -> Problem:
    sequences = np.arange(len(graph.batch.lengths) + 1)
    first = np.searchsorted(graph.blocks.sequence, sequences).astype(np.int64)
    num_blocks = np.diff(first)
    work_start = starts_of(num_blocks**2)
    work = np.zeros(work_start[-1])
    for name, tiles in graph.tiles.items():
        sequence = graph.blocks.sequence[tiles.q_block]
        row, column = tiles.q_block - first[sequence], tiles.k_block - first[sequence]
        cell = work_start[sequence] + row * num_blocks[sequence] + column
        work += np.bincount(cell, graph.tile_work(name), len(work))
    per_token = graph.payload_bytes.sum(axis=1)
    tokens = graph.blocks.tokens.astype(np.float64)
    q_bytes, kv_bytes = (tokens * per_token[kinds].sum() for kinds in (Q_KINDS, KV_KINDS))
    heads = np.array([0, *(group.num_kv_heads for group in graph.head_groups)])
    group_end = np.cumsum(heads) / heads.sum()
    return Problem(work, work_start, first, tokens, q_bytes, kv_bytes, group_end)


def find_cells(problem: Problem) -> Cells:
    cell = np.flatnonzero(problem.work)
    sequence = np.searchsorted(problem.work_start, cell, side="right") - 1
    stride, first = np.diff(problem.first_block)[sequence], problem.first_block[sequence]
    row, column = np.divmod(cell - problem.work_start[sequence], stride)
    return Cells(cell, first + row, first + column)


def diagonal(problem: Problem) -> Int64:
    """The cell of every block with itself."""
    stride = np.diff(problem.first_block)
    sequence = np.repeat(np.arange(len(stride)), stride)
    within = np.arange(len(problem.tokens)) - problem.first_block[sequence]
    cells: Int64 = problem.work_start[sequence] + within * (stride[sequence] + 1)
    return cells
