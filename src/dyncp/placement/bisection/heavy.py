"""Heavy rows: those that attend so much that one rank could not compute them alone.

The last rows of causal blockwise attend everything. No band of rows or columns suits them together
with the others, so they are first folded away: each of their tiles joins the diagonal tile of its
key block. The queries then travel to all ranks, which costs less than all keys to one.
"""

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.placement.bisection.problem import Cells, Problem, diagonal

# A heavy row has more than this share of a rank's mean work.
HEAVY = 0.5
# It also has so many times the work of its sequence's mean row; a causal sequence's last has twice.
UNUSUAL = 4.0


def heavy_cells(problem: Problem, cells: Cells, num_ranks: int) -> Bool:
    """Which cells are in heavy rows, but for their own diagonal."""
    row = np.bincount(cells.q_block, problem.work[cells.cell], len(problem.tokens))
    blocks = np.diff(problem.first_block)
    sequence = np.repeat(np.arange(len(blocks)), blocks)
    mean_row = (np.bincount(sequence, row, len(blocks)) / np.maximum(blocks, 1))[sequence]
    heavy = (row > HEAVY * problem.work.sum() / num_ranks) & (row > UNUSUAL * mean_row)
    chosen: Bool = heavy[cells.q_block] & (cells.q_block != cells.k_block)
    return chosen


def fold(problem: Problem, cells: Cells, chosen: Bool) -> Problem:
    """The problem with the work of chosen cells added to the diagonal of their key blocks."""
    work, moved = problem.work.copy(), cells.cell[chosen]
    work[moved] = 0.0
    np.add.at(work, _homes(problem, cells, chosen), problem.work[moved])
    return problem._replace(work=work)


def unfold(problem: Problem, cells: Cells, chosen: Bool, cell_rank: Int32) -> None:
    """Chosen cells get the rank of their key block's diagonal."""
    cell_rank[:, cells.cell[chosen]] = cell_rank[:, _homes(problem, cells, chosen)]


def _homes(problem: Problem, cells: Cells, chosen: Bool) -> Int64:
    return diagonal(problem)[cells.k_block[chosen]]
