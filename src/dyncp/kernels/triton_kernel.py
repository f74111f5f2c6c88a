"""Kernel `triton`: for any CUDA GPU from Ampere on, with the same bits every time."""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dyncp.arrays import UInt8
from dyncp.kernels.kernel import (
    BackwardInputs,
    Gradients,
    Index,
    IndexArrays,
    Kernel,
    KernelCall,
    RowState,
    RowStates,
    Sums,
)
from dyncp.kernels.row_ops import LOG2E
from dyncp.kernels.tile_lists import HALF, SIDE, classify_tiles, list_tiles_of, map_kernel_tiles
from dyncp.kernels.triton_attention import (
    attend_backward_keys,
    attend_backward_queries,
    attend_tiles,
)
from dyncp.plan import AttentionShape


class Pieces(NamedTuple):
    """Query rows and key rows that a program computes at once, its warps, and the stages of its
    load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# The three kernels. The tables have their pieces by padded head dim; pieces of KEYS are at most
# 64 × 64. A program needs about (rows + stages × 2 × keys) × head dim × item bytes of shared
# memory.
FORWARD, QUERIES, KEYS = range(3)
_HOPPER = {
    64: (Pieces(128, 128, 8, 3), Pieces(128, 128, 8, 2), Pieces(64, 64, 4, 2)),
    128: (Pieces(128, 128, 8, 3), Pieces(128, 128, 8, 2), Pieces(64, 64, 4, 2)),
    256: (Pieces(128, 64, 8, 2), Pieces(64, 32, 4, 2), Pieces(32, 64, 4, 2)),
}
_AMPERE = {
    64: (Pieces(128, 64, 4, 3), Pieces(64, 64, 4, 2), Pieces(64, 64, 4, 2)),
    128: (Pieces(128, 32, 4, 2), Pieces(64, 32, 4, 2), Pieces(32, 64, 4, 2)),
    256: (Pieces(64, 32, 4, 1), Pieces(32, 32, 4, 1), Pieces(32, 32, 4, 1)),
}
_FP32 = {
    64: (Pieces(64, 32, 4, 2), Pieces(32, 32, 4, 1), Pieces(32, 32, 4, 1)),
    128: (Pieces(32, 32, 4, 2), Pieces(32, 32, 4, 1), Pieces(32, 32, 4, 1)),
    256: (Pieces(32, 16, 4, 1), Pieces(16, 16, 4, 1), Pieces(16, 16, 4, 1)),
}


@cache
def choose_pieces(
    device: torch.device, padded_dim: int, dtype: torch.dtype
) -> tuple[Pieces, Pieces, Pieces]:
    if dtype == torch.float32:
        return _FP32[padded_dim]
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return (_HOPPER if hopper else _AMPERE)[padded_dim]


DTYPES = ("bf16", "fp16", "fp32")
HEAD_DIMS = range(16, 256 + 1, 8)


@dataclass(frozen=True, eq=False)
class Side:
    """Tile lists and row states of the query side or the key side of a call, on the device."""

    lists: Index  # entries of `TileLists`
    most_runs: int
    num_heavy: int
    states: Index  # uint8[2, rows]
    merges: bool

    def arguments(self, heads: int) -> tuple[int | Tensor, ...]:
        num_tiles, list_width = self.lists.array.shape
        sizes = (num_tiles, self.num_heavy, heads)
        return *sizes, self.lists.tensor, list_width, self.most_runs


@dataclass(frozen=True, eq=False)
class TritonCall:
    queries: Side
    keys: Side | None  # only in backward
    ranges: Index  # int32[R, 2, query rows in whole tiles]


class TritonKernel(Kernel):
    """Adds results to the sums of rows inside its kernels, as the row states say."""

    name = "triton"
    capturable = True

    def refuses(self, shape: AttentionShape) -> str:
        if shape.dtype in DTYPES and shape.head_dim in HEAD_DIMS:
            return ""
        return (
            f"kernel 'triton' takes {', '.join(DTYPES[:-1])} and {DTYPES[-1]} and head dims from "
            f"{HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in steps of {HEAD_DIMS.step}; q is {shape.dtype} "
            f"with head dim {shape.head_dim}. Kernel 'reference' takes all"
        )

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> TritonCall:
        tiles = map_kernel_tiles(call)
        queries = _side(tiles.state, call.q_states, SIDE, arrays)
        keys = None
        if backward:
            by_key = np.ascontiguousarray(classify_tiles(call, HALF).T)
            keys = _side(by_key, call.k_states, HALF, arrays)
        return TritonCall(queries, keys, arrays.add(tiles.ranges))

    def attend(
        self,
        lowered: TritonCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out: Sums,
        lse: Tensor,
    ) -> None:
        side, wide = lowered.queries, _wide(out, lowered.queries)
        pieces, options = _options(lowered, side, q, k, FORWARD)
        attend_tiles[(len(side.lists) * q.shape[1] * (SIDE // pieces.rows),)](
            _matrix(q, pieces.rows), _matrix(k, pieces.keys), _matrix(v, pieces.keys),
            out.final, wide, lse, out.final.stride(0), wide.stride(0), lse.stride(1),
            scale * LOG2E, len(q),
            *side.arguments(q.shape[1]), lowered.ranges.tensor, lowered.ranges.array.shape[2],
            side.states.tensor, **options,
        )  # fmt: skip

    def attend_backward(
        self, lowered: TritonCall, inputs: BackwardInputs, scale: float, grads: Gradients
    ) -> None:
        q, k, v, dout, lse, delta = inputs
        ranges, range_stride = lowered.ranges.tensor, lowered.ranges.array.shape[2]
        side, dq = lowered.queries, grads.dq.final
        wide = _wide(grads.dq, side)
        pieces, options = _options(lowered, side, q, k, QUERIES)
        attend_backward_queries[(len(side.lists) * q.shape[1] * (SIDE // pieces.rows),)](
            _matrix(q, pieces.rows), _matrix(k, pieces.keys), _matrix(v, pieces.keys),
            _matrix(dout, pieces.rows), lse, delta, dq, wide,
            lse.stride(1), delta.stride(1), dq.stride(0), wide.stride(0), scale, len(q),
            *side.arguments(q.shape[1]), ranges, range_stride, side.states.tensor, **options,
        )  # fmt: skip
        assert lowered.keys is not None, "this call was lowered for forward"
        side, dk, dv = lowered.keys, grads.dk, grads.dv
        wide_dk, wide_dv = _wide(dk, side), _wide(dv, side)
        pieces, options = _options(lowered, side, q, k, KEYS)
        attend_backward_keys[(len(side.lists) * k.shape[1] * (HALF // pieces.keys),)](
            _matrix(q, pieces.rows), _matrix(k, pieces.keys), _matrix(v, pieces.keys),
            _matrix(dout, pieces.rows), _vector(lse, pieces.rows), _vector(delta, pieces.rows),
            dk.final, dv.final, wide_dk, wide_dv,
            lse.stride(1), delta.stride(1),
            dk.final.stride(0), dv.final.stride(0), wide_dk.stride(0),
            scale, len(q), len(k), *side.arguments(k.shape[1]),
            _vector(ranges, pieces.rows), range_stride, side.states.tensor, **options,
        )  # fmt: skip


def _side(state: UInt8, states: RowStates, side: int, arrays: IndexArrays) -> Side:
    lists = list_tiles_of(state, states.touched, side)
    merges = (states.before != RowState.NOTHING).any() or (states.after == RowState.WIDE).any()
    by_row = arrays.add(np.stack([states.before, states.after]))
    return Side(arrays.add(lists.entries), lists.most_runs, lists.num_heavy, by_row, bool(merges))


def _wide(sums: Sums, side: Side) -> Tensor:
    """The wide tensor. A call that merges nothing never reads it and gets `final` instead, so that
    all such calls run the same compiled kernel, whether there is a wide tensor or not."""
    return sums.wide if side.merges and sums.wide is not None else sums.final


def _matrix(rows: Tensor, block_rows: int) -> TensorDescriptor:
    """A descriptor of [rows, heads × dim] for loading `block_rows` rows of one head."""
    num_rows, heads, dim = rows.shape
    strides = [rows.stride(0), 1]
    return TensorDescriptor(rows, [num_rows, heads * dim], strides, [block_rows, _padded(dim)])


def _vector(numbers: Tensor, block: int) -> TensorDescriptor:
    """A descriptor of all numbers in memory order, for loading `block` of them."""
    last = sum((n - 1) * step for n, step in zip(numbers.shape, numbers.stride(), strict=True))
    return TensorDescriptor(numbers, [last + 1], [1], [block])


def _padded(dim: int) -> int:
    return max(64, 1 << (dim - 1).bit_length())


def _options(
    lowered: TritonCall, side: Side, q: Tensor, k: Tensor, kernel: int
) -> tuple[Pieces, dict[str, Any]]:
    """The pieces of one of the three kernels, and the constants and options of its launch."""
    _, q_heads, dim = q.shape
    pieces = choose_pieces(q.device, _padded(dim), q.dtype)[kernel]
    return pieces, {
        "GROUP": q_heads // k.shape[1],
        "DIM": dim,
        "PADDED": _padded(dim),
        "BLOCK_M": pieces.rows,
        "BLOCK_N": pieces.keys,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "NUM_RANGES": len(lowered.ranges),
        "MERGES": side.merges,
        "num_warps": pieces.warps,
        "num_stages": pieces.stages,
    }
