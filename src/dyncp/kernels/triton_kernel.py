"""Kernel `triton`: the same bits every time, on any CUDA GPU from Ampere on."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
from dyncp.kernels.tile_lists import HALF, SIDE, TileLists, list_tiles_of, map_kernel_tiles
from dyncp.kernels.triton_attention import (
    attend_backward_keys,
    attend_backward_queries,
    attend_tiles,
)
from dyncp.plan import AttentionShape


class Pieces(NamedTuple):
    """Query rows and key rows of a piece, warps per program and stages of the load pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# The three kernels; below, their pieces by padded head dim, those of KEYS at most 64 × 64. Shared
# memory per program is about (rows + stages × 2 × keys) × head dim × item bytes.
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


def choose_pieces(
    device: torch.device, padded_dim: int, dtype: torch.dtype
) -> tuple[Pieces, Pieces, Pieces]:
    if dtype == torch.float32:
        return _FP32[padded_dim]
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return (_HOPPER if hopper else _AMPERE)[padded_dim]


DTYPES = ("bf16", "fp16", "fp32")
MOST_DIM, LEAST_DIM = 256, 16


@dataclass(frozen=True, eq=False)
class Side:
    """Tile lists and row states of one side of a call, on the device."""

    lists: Index  # `TileLists`
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
    keys: Side | None  # backward
    ranges: Index  # int32[R, 2, query rows in whole tiles]
    vectors: dict[int, TensorDescriptor] = field(default_factory=dict)

    def ranges_vector(self, block: int) -> TensorDescriptor:
        """The ranges for loads of `block` numbers; made once they are on the device."""
        if block not in self.vectors:
            self.vectors[block] = _vector(self.ranges.tensor, block)
        return self.vectors[block]


class TritonKernel(Kernel):
    """Merges inside its kernels, as the states of rows say."""

    name = "triton"
    capturable = True

    def refuses(self, shape: AttentionShape) -> str:
        if shape.dtype not in DTYPES:
            return (
                f"kernel 'triton' takes {', '.join(DTYPES)}; q is {shape.dtype}. "
                "Kernel 'reference' takes fp64"
            )
        if not LEAST_DIM <= shape.head_dim <= MOST_DIM or shape.head_dim % 8:
            return (
                f"kernel 'triton' takes head dims that are multiples of 8 from {LEAST_DIM} to "
                f"{MOST_DIM}; q has {shape.head_dim}"
            )
        return ""

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> TritonCall:
        tiles = map_kernel_tiles(call, halves=backward)
        queries = _side(list_tiles_of(tiles.state, call.q_states.touched), call.q_states, arrays)
        keys = None
        if tiles.halves is not None:
            halves = np.ascontiguousarray(tiles.halves.T)
            by_key = list_tiles_of(halves, call.k_states.touched, HALF)
            keys = _side(by_key, call.k_states, arrays)
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
        ranges = (lowered.ranges.tensor, lowered.ranges.array.shape[2])
        side, dq = lowered.queries, grads.dq.final
        wide = _wide(grads.dq, side)
        pieces, options = _options(lowered, side, q, k, QUERIES)
        attend_backward_queries[(len(side.lists) * q.shape[1] * (SIDE // pieces.rows),)](
            *_matrices(q, k, v, dout, pieces), lse, delta, dq, wide,
            lse.stride(1), delta.stride(1), dq.stride(0), wide.stride(0), scale, len(q),
            *side.arguments(q.shape[1]), *ranges, side.states.tensor, **options,
        )  # fmt: skip
        assert lowered.keys is not None, "this call was lowered for forward"
        side, dk, dv = lowered.keys, grads.dk, grads.dv
        wide_dk, wide_dv = _wide(dk, side), _wide(dv, side)
        pieces, options = _options(lowered, side, q, k, KEYS)
        lse_vector, delta_vector = _vector(lse, pieces.rows), _vector(delta, pieces.rows)
        attend_backward_keys[(len(side.lists) * k.shape[1] * (HALF // pieces.keys),)](
            *_matrices(q, k, v, dout, pieces), lse_vector, delta_vector,
            dk.final, dv.final, wide_dk, wide_dv,
            lse.stride(1), delta.stride(1),
            dk.final.stride(0), dv.final.stride(0), wide_dk.stride(0),
            scale, len(q), len(k), *side.arguments(k.shape[1]),
            lowered.ranges_vector(pieces.rows), ranges[1], side.states.tensor, **options,
        )  # fmt: skip


def _side(lists: TileLists, states: RowStates, arrays: IndexArrays) -> Side:
    held = (states.before != RowState.NOTHING).any() or (states.after == RowState.WIDE).any()
    of_rows = arrays.add(np.stack([states.before, states.after]))
    return Side(arrays.add(lists.entries), lists.most_runs, lists.num_heavy, of_rows, bool(held))


def _wide(sums: Sums, side: Side) -> Tensor:
    """Calls that merge nothing never look at it: one kernel, whether other calls do or not."""
    return sums.wide if side.merges and sums.wide is not None else sums.final


def _matrix(rows: Tensor, block_rows: int) -> TensorDescriptor:
    """[rows, heads × dim] for loads of `block_rows` of one head."""
    num_rows, heads, dim = rows.shape
    strides = [rows.stride(0), 1]
    return TensorDescriptor(rows, [num_rows, heads * dim], strides, [block_rows, _padded(dim)])


def _vector(numbers: Tensor, block: int) -> TensorDescriptor:
    """All numbers in the order of memory, for loads of `block` of them."""
    last = sum((n - 1) * step for n, step in zip(numbers.shape, numbers.stride(), strict=True))
    return TensorDescriptor(numbers, [last + 1], [1], [block])


def _matrices(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, pieces: Pieces
) -> tuple[TensorDescriptor, ...]:
    return (
        _matrix(q, pieces.rows),
        _matrix(k, pieces.keys),
        _matrix(v, pieces.keys),
        _matrix(dout, pieces.rows),
    )


def _padded(dim: int) -> int:
    return max(64, 1 << (dim - 1).bit_length())


def _options(
    lowered: TritonCall, side: Side, q: Tensor, k: Tensor, kernel: int
) -> tuple[Pieces, dict[str, Any]]:
    _, q_heads, dim = q.shape
    sizes = (q_heads, k.shape[1], dim, len(lowered.ranges))
    return _options_of(q.device, q.dtype, *sizes, kernel, side.merges)


@lru_cache
def _options_of(
    device: torch.device,
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    dim: int,
    num_ranges: int,
    kernel: int,
    merges: bool,
) -> tuple[Pieces, dict[str, Any]]:
    padded = _padded(dim)
    pieces = choose_pieces(device, padded, dtype)[kernel]
    return pieces, {
        "GROUP": q_heads // kv_heads,
        "DIM": dim,
        "PADDED": padded,
        "BLOCK_M": pieces.rows,
        "BLOCK_N": pieces.keys,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "NUM_RANGES": num_ranges,
        "MERGES": merges,
        "num_warps": pieces.warps,
        "num_stages": pieces.stages,
    }
