"""Kernel `flash4`: flash-attn-4 over lists of kernel tiles with ranges of key rows, or its own
causal and varlen paths where a call is just that."""

from itertools import pairwise
from typing import Any

from torch import Tensor

from dyncp.arrays import Int32
from dyncp.kernels.call import KernelCall
from dyncp.kernels.flash4 import compiled as flash
from dyncp.kernels.flash4.lowering import MOST_SEQUENCES, Lowered, lower_call, padded
from dyncp.kernels.index_arrays import IndexArrays
from dyncp.kernels.kernel import Gradients, Sums
from dyncp.kernels.tile_lists import SIDE
from dyncp.kernels.triton.kernel import TritonKernel
from dyncp.plan import AttentionShape

DTYPES = ("bf16", "fp16")
HEAD_DIMS = range(16, 128 + 1, 8)  # above, its kernel tiles are not 128 × 128
DIM_MULTIPLE = 16  # of the head dim of its gradient sums
PANELS = 2  # axes of collected sums; rows have three
WIDE_TILES = 64  # up to this head dim, its kernel tiles have 128 query rows backward, else 64


class Flash4Kernel:
    """`deterministic` takes the backward of kernel `triton`; otherwise gradients are added up by
    atomics, in any order."""

    name = "flash4"
    capturable = True  # its calls allocate nothing and wait for nothing
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
        lowered: Lowered,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out: Sums,
        lse: Tensor,
    ) -> None:
        rows, keys = lowered.rows, lowered.keys
        inputs = (_part(q, rows), _part(k, keys), _part(v, keys), scale, lowered.shape())
        first = slice(0, rows.stop - rows.start)
        flash.attend(*inputs, _part(out.final, first), _part(lse, first).T)

    def attend_backward(
        self,
        lowered: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: Gradients,
    ) -> None:
        if not self.collects:
            self._triton.attend_backward(lowered, inputs, dout, lse, delta, scale, grads)
            return
        rows, keys, (q, k, v) = lowered.rows, lowered.keys, inputs
        dim, whole = padded_dim(q.shape[2]), lowered.sequences is not None
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
            lowered.shape(),
            flash.Accumulators(_panels(dq, rows, dim, whole=whole), dk, dv),
        )

    def sequence_runs(
        self, lowered: Lowered, dim: int
    ) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int, int]]]:
        """First row, rows, place and rows there of whole sequences, of queries and of keys, where a
        backward call consists of them: each begins on a border of its kernel tiles."""
        if lowered.sequences is None:
            return [], []
        queries = SIDE if dim <= WIDE_TILES else SIDE // 2
        starts = lowered.sequences.q_starts, lowered.sequences.k_starts
        return _runs(starts[0], queries), _runs(starts[1], SIDE)


def _runs(starts: Int32, side: int) -> list[tuple[int, int, int, int]]:
    return [
        (first, end - first, (first + i * side) // side * side, -(-(end - first) // side) * side)
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
    """x[rows], which costs host time where it is all of x."""
    return x if x.shape[0] == rows.stop - rows.start else x[rows]
