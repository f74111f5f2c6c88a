"""Kernel `flash4`: flash-attn-4 over tile lists. Calls that consist of whole causal sequences run
on flash-attn-4's own causal and varlen paths instead."""

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
    """`q_starts` and `k_starts` of a call that consists of causal sequences; None for other calls.

    Query rows q_starts[i]:q_starts[i + 1] attend key rows k_starts[i]:k_starts[i + 1]. The last row
    attends all of them, and every row before it one key less. Both begin at row 0."""
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
    """Writes the span of key rows of every query row; False if a row has several spans."""
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


MOST_SEQUENCES = 256  # for more, flash-attn-4's varlen path needs tables that we do not make


@dataclass(frozen=True, eq=False)
class FlashCall:
    """`rows` and `keys` are the rows that flash-attn-4 gets; tile lists are relative to their
    starts. `shape` says which path of flash-attn-4 is called, with its lists or sequences."""

    rows: slice
    keys: slice
    shape: flash.Shape


def _takes_own_path(starts: Starts, call: KernelCall, backward: bool) -> bool:
    """Whether the call runs on flash-attn-4's causal path (one sequence) or varlen path (several).

    Varlen gradient sums have a different layout than those of tile lists, so a backward call uses
    varlen only if it is the program's only call. The sequences must cover all rows of the call.
    Small calls use tile lists, because flash-attn-4 compiles separate kernels for calls of a single
    kernel tile."""
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
HEAD_DIMS = range(16, 128 + 1, 8)  # above 128, flash-attn-4's kernel tiles are not 128 × 128
DIM_MULTIPLE = 16  # the head dim of gradient sums is padded to multiples of this
PANELS = 2  # number of axes of sums in panels; rows have three
WIDE_TILES = 64  # backward kernel tiles have 128 query rows up to this head dim, 64 above


class Flash4Kernel(Kernel):
    """With `deterministic`, backward is that of kernel `triton`. Otherwise it is flash-attn-4's,
    which adds up gradients by atomics, in any order."""

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
        if shape.dtype in DTYPES and shape.head_dim in HEAD_DIMS:
            return ""
        return (
            f"kernel 'flash4' takes {' and '.join(DTYPES)} and head dims from {HEAD_DIMS[0]} to "
            f"{HEAD_DIMS[-1]} in steps of {HEAD_DIMS.step} (others are not tested); q is "
            f"{shape.dtype} with head dim {shape.head_dim}. Kernel 'triton' takes more; "
            "kernel='auto' chooses one that fits"
        )

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        if backward and not self.collects:
            return self._triton.lower(call, arrays, backward=True)
        starts = find_sequences(call)
        if starts is None or not _takes_own_path(starts, call, backward):
            return _lower_lists(call, arrays, backward)
        # Rows after the last sequence are left out: nobody reads their results.
        rows, keys = (slice(0, int(x[-1])) for x in starts)
        if len(starts[0]) == 2:  # one sequence
            return FlashCall(rows, keys, None)
        return FlashCall(rows, keys, flash.Varlen(*(arrays.add(x) for x in starts)))

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
        dim = -(-q.shape[2] // DIM_MULTIPLE) * DIM_MULTIPLE
        whole = isinstance(lowered.shape, flash.Varlen)
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
        """In varlen sums, each sequence begins at the start of a kernel tile."""
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


def _panels(sums: Tensor, rows: slice, dim: int, *, whole: bool) -> Tensor:
    """The panels of these rows; all panels if `whole`."""
    return sums if whole else sums[:, rows.start * dim : padded(rows).stop * dim]


def _padded_heads(per_head: Tensor) -> Tensor:
    """[rows, heads] as [heads, padded rows], which is how they are stored; a view."""
    heads, stride = per_head.shape[1], per_head.stride(1)
    return per_head.as_strided((heads, stride), (stride, 1))


def _part(x: Tensor, rows: slice) -> Tensor:
    """x[rows]. Skips the slicing if these are all rows of x, which saves host time."""
    return x if x.shape[0] == rows.stop - rows.start else x[rows]
