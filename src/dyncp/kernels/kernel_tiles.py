"""Kernel tiles: a call cut into a device's own row and column pieces, for kernels that work so.

Short sequences share kernel tiles. Let rows 0-1 be block A and 2-3 block B of one sequence, kernel
tiles have 4 rows, and this call has only the tile A × A:

    A x . . .       the one listed kernel tile also holds B × A and B × B, which another division
    A x x . .       or rank computes. So the ranges of every row are cut to the key blocks that its
    B o o o .       block meets in this call: rows 2-3 keep nothing, and nothing is computed twice.
    B o o o o
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.kernels.call import KernelCall


@dataclass(frozen=True, eq=False)
class KernelTiles:
    """Listed kernel tiles, ordered, and the cut ranges. A pair is computed iff its kernel tile is
    listed and the key's coordinate lies in the query row's ranges."""

    rows: int
    columns: int
    q_tile: Int64  # [listed]
    k_tile: Int64  # [listed]
    ranges: Int32  # [query rows, R, 2], coordinates


def list_kernel_tiles(call: KernelCall, rows: int, columns: int) -> KernelTiles:
    q_tiles, k_tiles = (-(-len(call.q_coordinates) // rows), -(-len(call.k_coordinates) // columns))
    listed: Bool = np.zeros((q_tiles, k_tiles), np.bool_)
    for q0, q1, k0, k1 in call.rectangles:
        listed[q0 // rows : -(-q1 // rows), k0 // columns : -(-k1 // columns)] = True
    q_tile, k_tile = np.nonzero(listed)
    return KernelTiles(rows, columns, q_tile, k_tile, _cut_ranges(call))


def _cut_ranges(call: KernelCall) -> Int32:
    """Each row's ranges, cut to the key blocks that the row meets in this call."""
    pieces: list[tuple[Int64, Int32]] = []
    starts = np.unique(call.rectangles[:, :2], axis=0)
    for q0, q1 in starts:
        mine = call.rectangles[(call.rectangles[:, 0] == q0) & (call.rectangles[:, 1] == q1)]
        first = np.sort(call.k_coordinates[mine[:, 2]])
        width = (mine[:, 3] - mine[:, 2])[np.argsort(call.k_coordinates[mine[:, 2]])]
        pieces.append((np.arange(q0, q1), _intersect(call.ranges[q0:q1], first, first + width)))
    most = max((cut.shape[1] for _, cut in pieces), default=1)
    ranges = np.zeros((len(call.q_coordinates), most, 2), np.int32)
    for rows, cut in pieces:
        ranges[rows, : cut.shape[1]] = cut
    return ranges


def _intersect(ranges: Int32, first: Int64, last: Int64) -> Int32:
    """Ranges [rows, R, 2] met with the intervals [first, last): [rows, up to R × intervals, 2]."""
    joined = np.append(True, first[1:] != last[:-1])
    first, last = first[joined], last[np.append(joined[1:], True)]
    start = np.maximum(ranges[:, :, None, 0], first)
    end = np.minimum(ranges[:, :, None, 1], last)
    end = np.maximum(start, end)
    cut = np.stack([start, end], axis=-1).reshape(len(ranges), -1, 2)
    used = (cut[:, :, 1] > cut[:, :, 0]).any(axis=0)
    return cut[:, used].astype(np.int32)
