"""Cuts of one sequence's tiles: a band of rows (or columns) against the rest.

With a = 0 the band [a, b) is a straight cut, otherwise a sandwich, which is what zigzag is. Cutting
rows costs the KV bytes of the columns that both sides then need:

    A A . .        band of rows 1-2 against rows 0 and 3, causal: columns 0, 1 and 2 are needed on
    B B . .        both sides, column 3 only by A
    B B B .
    A A A A
"""

from typing import NamedTuple

import numba
import numpy as np

from dyncp.arrays import Float64, Int32, Int64
from dyncp.placement.bisection.problem import Problem

# Start rows tried per cut.
MAX_STARTS = 48


class Lines(NamedTuple):
    """A piece's tiles seen along its rows (or columns): running sums before each line."""

    work: Float64  # [lines + 1]
    tokens: Float64  # [lines + 1], of the blocks whose diagonal tile is in the piece
    seen: Int32  # [lines + 1, across]: lines so far that have a tile in this crossing line
    size: Float64  # [across] bytes of the crossing lines' data blocks


@numba.njit(cache=True, nogil=True)
def sum_lines(problem: Problem, sequence: int, rows: Int64, columns: Int64, by_rows: bool) -> Lines:
    """`rows` and `columns` are blocks of the sequence, counted from its first."""
    lines, across = (rows, columns) if by_rows else (columns, rows)
    first = problem.first_block[sequence]
    stride = problem.first_block[sequence + 1] - first
    base = problem.work_start[sequence]
    work, tokens = np.zeros(len(lines) + 1), np.zeros(len(lines) + 1)
    seen = np.zeros((len(lines) + 1, len(across)), np.int32)
    size = np.empty(len(across))
    for j in range(len(across)):
        block = first + across[j]
        size[j] = problem.kv_bytes[block] if by_rows else problem.q_bytes[block]
    for i in range(len(lines)):
        total, owned = 0.0, 0.0
        for j in range(len(across)):
            row, column = (lines[i], across[j]) if by_rows else (across[j], lines[i])
            weight = problem.work[base + row * stride + column]
            total += weight
            seen[i + 1, j] = seen[i, j] + (weight > 0)
            if row == column:
                owned = problem.tokens[first + row]
        work[i + 1] = work[i] + total
        tokens[i + 1] = tokens[i] + owned
    return Lines(work, tokens, seen, size)


@numba.njit(cache=True, nogil=True)
def best_band(lines: Lines, low: Float64, high: Float64, penalty: float) -> tuple[float, int, int]:
    """Cheapest band: (its bytes, first line, end line); infinite bytes where there is none.

    Its work and tokens should lie in [low, high] (each: work, tokens); missing that by the piece's
    whole load costs `penalty` in the choice.
    """
    count = len(lines.work) - 1
    best, best_bytes, best_a, best_b = np.inf, np.inf, 0, 0
    step = max(1, count // MAX_STARTS)
    for a in range(0, count, step):
        tried = -1
        for aim in range(3):
            target = lines.work[a] + low[0] + (high[0] - low[0]) * aim / 2
            nearest = _first_at_least(lines.work, target)
            for b in range(nearest - 1, nearest + 1):
                if b <= a or b > count or b <= tried or b - a == count:
                    continue
                tried = b
                missed = penalty * (
                    _miss(lines.work, a, b, low[0], high[0])
                    + _miss(lines.tokens, a, b, low[1], high[1])
                )
                if missed >= best:
                    continue
                cost = _crossing_bytes(lines, a, b, best - missed)
                if cost + missed < best:
                    best, best_bytes, best_a, best_b = cost + missed, cost, a, b
    return best_bytes, best_a, best_b


@numba.njit(cache=True, nogil=True)
def _first_at_least(running: Float64, target: float) -> int:
    """numpy's searchsorted, which takes half a second more to compile."""
    low, high = 0, len(running)
    while low < high:
        middle = (low + high) // 2
        if running[middle] < target:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def _miss(running: Float64, a: int, b: int, low: float, high: float) -> float:
    value, total = running[b] - running[a], running[-1]
    return max(0.0, low - value, value - high) / total if total > 0 else 0.0


@numba.njit(cache=True, nogil=True)
def _crossing_bytes(lines: Lines, a: int, b: int, enough: float) -> float:
    """Bytes of the crossing lines that band and rest both need; stops counting at `enough`."""
    last, cost = len(lines.seen) - 1, 0.0
    for j in range(len(lines.size)):
        inside = lines.seen[b, j] - lines.seen[a, j]
        if 0 < inside < lines.seen[last, j]:
            cost += lines.size[j]
            if cost >= enough:
                break
    return cost
