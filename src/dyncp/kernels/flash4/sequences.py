"""Finds calls that are whole causal sequences below each other, for flash-attn-4's own paths."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.compiled import compiled
from dyncp.kernels.call import KernelCall


@dataclass(frozen=True, eq=False)
class Sequences:
    """Query rows q_starts[i]:q_starts[i + 1] see key rows k_starts[i]:k_starts[i + 1], causally
    from the last row back; both begin at row 0."""

    q_starts: Int32
    k_starts: Int32


def find_sequences(call: KernelCall) -> Sequences | None:
    """The sequences of a call that consists of nothing else."""
    spans = np.zeros((len(call.q_coordinates), 2), np.int64)
    order = np.lexsort((call.rectangles[:, 2], call.rectangles[:, 0]))
    rectangles = call.rectangles[order]
    if not _join_spans(spans, rectangles, call.k_coordinates, call.ranges):
        return None
    used = np.flatnonzero(spans[:, 1] > spans[:, 0])
    if not len(used) or len(used) != used[-1] + 1:
        return None
    start, end = spans[: len(used)].T
    head = np.append(True, start[1:] != start[:-1])
    q_starts = np.append(np.flatnonzero(head), len(used))
    grows = (np.diff(end) == 1) | head[1:]
    last = end[q_starts[1:] - 1]
    k_starts = np.append(0, last)
    follows = (start[head] == k_starts[:-1]).all() and grows.all()
    longer = (np.diff(k_starts) >= np.diff(q_starts)).all()
    if not follows or not longer or rectangles[:, 1].max() > len(used):
        return None
    return Sequences(q_starts.astype(np.int32), k_starts.astype(np.int32))


@compiled
def _join_spans(spans: Int64, rectangles: Int64, k_coordinates: Int64, ranges: Int32) -> bool:
    """Fills the one span of key rows of every query row; False where a row has several."""
    for i in range(len(rectangles)):
        q0, q1, k0, k1 = rectangles[i]
        shift = k0 - k_coordinates[k0]
        for row in range(q0, q1):
            for r in range(ranges.shape[1]):
                start = max(ranges[row, r, 0] + shift, k0)
                end = min(ranges[row, r, 1] + shift, k1)
                if start >= end:
                    continue
                if spans[row, 1] == spans[row, 0]:
                    spans[row, 0], spans[row, 1] = start, end
                elif spans[row, 1] == start:
                    spans[row, 1] = end
                else:
                    return False
    return True
