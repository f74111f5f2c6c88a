"""Regions: tiles to be shared by some ranks."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.placement.bisection.problem import Problem


class Region(NamedTuple):
    """At most one piece per sequence: the tiles in rows × columns × head groups.

    `pieces` is [pieces, 7]: sequence, then begin and end of its rows and of its columns in `lines`
    (blocks counted from the sequence's first), then begin and end of its head groups. `load` is
    [pieces, 2]: work, and tokens of the blocks whose diagonal is in."""

    pieces: Int64
    lines: Int64
    load: Float64

    @property
    def rows(self) -> Int64:
        """The blocks of all rows, counted from their sequences' first."""
        begin, counts = self.pieces[:, 1], self.pieces[:, 2] - self.pieces[:, 1]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Int64 = self.lines[np.repeat(begin, counts) + within]
        return rows


def whole_batch(problem: Problem) -> Region:
    first, groups = problem.first_block, problem.num_groups
    blocks = np.diff(first)
    sequence = np.arange(len(blocks))
    begin, end = first[:-1], first[1:]
    none = np.zeros(len(blocks), np.int64)
    pieces = np.stack([sequence, begin, end, begin, end, none, none + groups], axis=1)
    lines = np.arange(first[-1]) - np.repeat(begin, blocks)
    load = np.stack([_sums(problem.work, problem.work_start), _sums(problem.tokens, first)], axis=1)
    return Region(pieces, lines, load)


def _sums(values: Float64, start: Int64) -> Float64:
    return np.diff(np.append(0.0, np.cumsum(values))[start])


def region_of_rows(problem: Problem, chosen: Bool) -> Region:
    """The chosen blocks' rows with all columns of their sequences."""
    whole = whole_batch(problem)
    blocks = np.flatnonzero(chosen)
    of_block = np.searchsorted(problem.first_block, blocks, side="right") - 1
    sequence, begin, counts = np.unique(of_block, return_index=True, return_counts=True)
    pieces = whole.pieces[sequence]
    pieces[:, 3:5] += len(blocks)
    pieces[:, 1], pieces[:, 2] = begin, begin + counts
    lines = np.concatenate([blocks - problem.first_block[of_block], whole.lines])
    stride = np.diff(problem.first_block)[of_block]
    row = problem.work_start[of_block] + lines[: len(blocks)] * stride
    running = np.append(0.0, np.cumsum(problem.work))
    per_block = np.stack([running[row + stride] - running[row], problem.tokens[blocks]], axis=1)
    load = np.add.reduceat(per_block, begin) if len(begin) else np.zeros((0, 2))
    return Region(pieces, lines, load)


class Parts(NamedTuple):
    """Regions of all nodes: pieces [span[n, 0], span[n, 1]) belong to node n. The other fields are
    a Region's, with free room at their ends."""

    pieces: Int64
    lines: Int64
    load: Float64
    span: Int64
