"""Kernel `flash4`: flash-attn-4 over lists of kernel tiles with ranges of key rows, or its own
causal and varlen paths where a call is just that."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from dyncp.arrays import Int32, Int64
from dyncp.compiled import compiled
from dyncp.kernels import flash4_compiled as flash
from dyncp.kernels.kernel import (
    BackwardInputs,
    Gradients,
    IndexArrays,
    Kernel,
    KernelCall,
    SequenceRows,
    Sums,
)
from dyncp.kernels.tile_lists import (
    FULL,
    PARTIAL,
    SIDE,
    list_marked,
    map_kernel_tiles,
    transpose_ranges,
)
from dyncp.kernels.triton_kernel import TritonKernel
from dyncp.plan import AttentionShape

Starts = tuple[Int32, Int32]


def find_sequences(call: KernelCall) -> Starts | None:
    """The causal sequences of a call that consists of nothing else: `q_starts` and `k_starts`.

    Query rows q_starts[i]:q_starts[i + 1] see key rows k_starts[i]:k_starts[i + 1], causally from
    the last row back; both begin at row 0."""
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
    return q_starts.astype(np.int32), k_starts.astype(np.int32)


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


MOST_SEQUENCES = 256  # above, its varlen path wants tables that we do not make


@dataclass(frozen=True, eq=False)
class FlashCall:
    """`rows` and `keys` are the kernel tiles that the call touches; lists count from their starts.
    `shape` is what flash-attn-4 is told."""

    rows: slice
    keys: slice
    shape: flash.Shape


def lower_call(call: KernelCall, arrays: IndexArrays, *, backward: bool) -> FlashCall:
    starts = find_sequences(call)
    if starts is not None and _takes_own_path(starts, call, backward):
        # Rows behind the last sequence are not part of it: nobody reads what the call leaves there.
        rows, keys = (slice(0, int(x[-1])) for x in starts)
        several = len(starts[0]) > 2
        varlen = flash.Varlen(*(arrays.add(x) for x in starts)) if several else None
        return FlashCall(rows, keys, varlen)
    return _lower_lists(call, arrays, backward)


def _takes_own_path(starts: Starts, call: KernelCall, backward: bool) -> bool:
    """One causal sequence collects gradients as tile lists do; several have a different layout,
    which only a program of one call may use. Its rows must be those of the call. Flash-attn-4
    compiles calls of one piece apart: small ones are not worth it."""
    queries, keys = (int(x[-1]) for x in starts)
    if queries <= flash.MOST_SINGLE or keys <= SIDE:
        return False
    if (call.q_rows.start, call.k_rows.start) != (0, 0) or call.rectangles[:, 3].max() > keys:
        return False
    count = len(starts[0]) - 1
    return count == 1 or (count <= MOST_SEQUENCES and (call.alone or not backward))


def _lower_lists(call: KernelCall, arrays: IndexArrays, backward: bool) -> FlashCall:
    tiles, rows, keys = map_kernel_tiles(call), call.q_rows, call.k_rows
    state = tiles.state[_tiles(rows), _tiles(keys)]
    if backward:
        state, ranges = state.T, transpose_ranges(tiles)[:, :, padded(keys)] - rows.start
    else:
        ranges = tiles.ranges[:, :, padded(rows)] - keys.start
    lists = (*list_marked(state == PARTIAL), *list_marked(state == FULL))
    given = (*lists, ranges.reshape(-1, ranges.shape[2]))
    return FlashCall(rows, keys, flash.SparseLists(*(arrays.add(x) for x in given)))


def _tiles(rows: slice) -> slice:
    return slice(rows.start // SIDE, -(-rows.stop // SIDE))


def padded(rows: slice) -> slice:
    return slice(rows.start, -(-rows.stop // SIDE) * SIDE)


DTYPES = ("bf16", "fp16")
HEAD_DIMS = range(16, 128 + 1, 8)  # above, its kernel tiles are not 128 × 128
DIM_MULTIPLE = 16  # of the head dim of its gradient sums
PANELS = 2  # axes of collected sums; rows have three
WIDE_TILES = 64  # up to this head dim, its kernel tiles have 128 query rows backward, else 64


class Flash4Kernel(Kernel):
    """`deterministic` takes the backward of kernel `triton`; otherwise gradients are added up by
    atomics, in any order."""

    name = "flash4"
    capturable = True
    merges = False
    row_multiple = SIDE
    dim_multiple = DIM_MULTIPLE

    def __init__(self, *, deterministic: bool) -> None:
        self.collects = not deterministic
        self.most_sequences = MOST_SEQUENCES if self.collects else 0
        self._triton = TritonKernel()

    def refuses(self, shape: AttentionShape) -> str:
        """Why this kernel does not take such inputs; empty if it does."""
        if shape.dtype in DTYPES and shape.head_dim in HEAD_DIMS:
            return ""
        return (
            f"kernel 'flash4' takes {' and '.join(DTYPES)} and head dims from {HEAD_DIMS[0]} to "
            f"{HEAD_DIMS[-1]} in steps of {HEAD_DIMS.step}, which is what is tested; q is "
            f"{shape.dtype} with head dim {shape.head_dim}. Kernel 'triton' takes more; "
            "kernel='auto' finds the one that fits"
        )

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        if backward and not self.collects:
            return self._triton.lower(call, arrays, backward=True)
        return lower_call(call, arrays, backward=backward)

    def attend(
        self,
        lowered: FlashCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out: Sums,
        lse: Tensor,
    ) -> None:
        rows, keys = lowered.rows, lowered.keys
        inputs = (_part(q, rows), _part(k, keys), _part(v, keys), scale, lowered.shape)
        first = slice(0, rows.stop - rows.start)
        flash.attend(*inputs, _part(out.final, first), _part(lse, first).T)

    def attend_backward(
        self, lowered: Any, inputs: BackwardInputs, scale: float, grads: Gradients
    ) -> None:
        if not self.collects:
            self._triton.attend_backward(lowered, inputs, scale, grads)
            return
        rows, keys, (q, k, v, dout, lse, delta) = lowered.rows, lowered.keys, inputs
        dim, whole = padded_dim(q.shape[2]), isinstance(lowered.shape, flash.Varlen)
        places = slice(None) if whole else padded(rows)
        first = slice(0, keys.stop - keys.start)
        dq, dk, dv = grads.dq.final, grads.dk.final, grads.dv.final
        if dk.ndim == PANELS:
            dk, dv = (_panels(x, keys, dim, whole=whole) for x in (dk, dv))
        else:
            dk, dv = _part(dk, first), _part(dv, first)
        flash.attend_backward(
            (_part(q, rows), _part(k, keys), _part(v, keys)),
            _part(dout, rows),
            _padded_heads(lse)[:, places],
            _padded_heads(delta)[:, places],
            scale,
            lowered.shape,
            (_panels(dq, rows, dim, whole=whole), dk, dv),
        )

    def sequence_rows(
        self, lowered: FlashCall, dim: int
    ) -> tuple[list[SequenceRows], list[SequenceRows]]:
        """Each sequence begins on a border of the kernel tiles."""
        shape = lowered.shape
        if not isinstance(shape, flash.Varlen):
            return [], []
        queries = SIDE if dim <= WIDE_TILES else SIDE // 2
        return _aligned(shape.q_starts.array, queries), _aligned(shape.k_starts.array, SIDE)


def _aligned(starts: Int32, side: int) -> list[SequenceRows]:
    return [
        SequenceRows(
            first,
            end - first,
            (first + i * side) // side * side,
            -(-(end - first) // side) * side,
        )
        for i, (first, end) in enumerate(pairwise(starts.tolist()))
    ]


def padded_dim(dim: int) -> int:
    """Head dim of its sums."""
    return -(-dim // DIM_MULTIPLE) * DIM_MULTIPLE


def _panels(sums: Tensor, rows: slice, dim: int, *, whole: bool) -> Tensor:
    return sums if whole else sums[:, rows.start * dim : padded(rows).stop * dim]


def _padded_heads(per_head: Tensor) -> Tensor:
    """[heads, padded rows] of [rows, heads], which lie so."""
    heads, stride = per_head.shape[1], per_head.stride(1)
    return per_head.as_strided((heads, stride), (stride, 1))


def _part(x: Tensor, rows: slice) -> Tensor:
    """x[rows]; skips the slice if it is all of x, which saves host time."""
    return x if x.shape[0] == rows.stop - rows.start else x[rows]
