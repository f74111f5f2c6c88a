"""Row operations in Triton: one launch for all segments of a table.

Sizes and strides are plain arguments, and those that change from batch to batch are never
specialised on; only head counts, dimensions and dtypes compile anew. A row's column c lies at
`row × row stride + (c // dim) × head stride + c % dim`, which also describes log-sum-exps that lie
heads first: they have dim 1.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from dyncp.arrays import Int64, starts_of
from dyncp.kernels.accumulate import accumulator_dtype
from dyncp.kernels.index_arrays import Index, IndexArrays
from dyncp.kernels.kernel import Sums
from dyncp.kernels.row_ops import COUNT, ROW

CHUNK = 16  # rows of one program
COPY_COLUMNS = 1024  # of one program
MERGE_ITEMS = 4096  # of one program: rows × heads × dim, held in registers in fp32
WARPS = 4


def _copy(
    table,
    first,
    rows,
    message,
    head_stride,
    row_stride,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    FLAT: tl.constexpr,
    VECTOR: tl.constexpr,
    PACKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    chunk = table + (first + tl.program_id(0)) * 8
    row = tl.load(chunk)
    offset = tl.multiple_of(tl.load(chunk + 1), VECTOR)
    count = tl.load(chunk + 2)
    skipped = tl.load(chunk + 6)
    step = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (step < count) & (column < WIDTH)
    if FLAT:
        own = rows + (row + step) * row_stride + column
    else:
        own = rows + (row + step) * row_stride
        own += (column // DIM).to(tl.int64) * head_stride + column % DIM
    other = message + offset + (skipped + step) * WIDTH + column
    if PACKS:
        tl.store(other, tl.load(own, mask=inside).to(message.dtype.element_ty), mask=inside)
    else:
        tl.store(own, tl.load(other, mask=inside).to(rows.dtype.element_ty), mask=inside)


_copy_rows = triton.jit(_copy, do_not_specialize=["first", "head_stride"])
# Virtual ranks' log-sum-exps begin anywhere, and are few: one kernel for any alignment.
_copy_per_head = triton.jit(
    _copy,
    do_not_specialize=["first", "head_stride"],
    do_not_specialize_on_alignment=["rows"],
)


@triton.jit(
    do_not_specialize=["first", "lse_stride"],
    do_not_specialize_on_alignment=["lse", "message_lse"],
)
def _merge_rows(
    table,
    first,
    final,
    wide,
    lse,
    message,
    message_lse,
    lse_stride,
    final_stride,
    wide_stride,
    lse_row_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FINAL_HEAD: tl.constexpr,
    HAS_LSE: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Merges partial outputs by their log-sum-exps, or (without HAS_LSE) adds gradients."""
    chunk = table + (first + tl.program_id(0)) * 8
    row = tl.load(chunk)
    offset = tl.multiple_of(tl.load(chunk + 1), VECTOR)
    count = tl.load(chunk + 2)
    before = tl.load(chunk + 3 + tl.zeros([ROWS], tl.int32))  # one number; masks need a tensor
    after = tl.load(chunk + 4 + tl.zeros([ROWS], tl.int32))
    skipped = tl.load(chunk + 6)
    step = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    of_head = (step[:, None] < count) & (head[None, :] < NUM_HEADS)
    inside = of_head[:, :, None] & (column[None, None, :] < DIM)
    place = head[None, :, None] * DIM + column[None, None, :]
    new = message + offset + (skipped + step)[:, None, None] * (NUM_HEADS * DIM) + place
    where_final = final + (row + step)[:, None, None] * final_stride
    where_final += head[None, :, None] * FINAL_HEAD + column[None, None, :]
    sum_dtype = lse.dtype.element_ty
    value = tl.load(new, mask=inside, other=0.0).to(sum_dtype)
    old = tl.load(where_final, mask=inside & (before == 1)[:, None, None], other=0.0).to(sum_dtype)
    where_wide = wide + (row + step)[:, None, None] * wide_stride + place
    old += tl.load(where_wide, mask=inside & (before == 2)[:, None, None], other=0.0)
    if HAS_LSE:
        lse_offset = tl.load(chunk + 5)
        where_lse = lse + (row + step)[:, None] * lse_row_stride
        where_lse += head[None, :].to(tl.int64) * lse_stride
        new_lse = message_lse + lse_offset + (skipped + step)[:, None] * NUM_HEADS + head[None, :]
        nothing = float("-inf")
        mine = tl.load(where_lse, mask=of_head & (before != 0)[:, None], other=nothing)
        theirs = tl.load(new_lse, mask=of_head, other=nothing)
        # Rows that attended nothing have log-sum-exp −∞ and share 0, also when both sides have.
        top = tl.maximum(mine, theirs)
        top = tl.where(top == nothing, 0.0, top)
        my_share, their_share = tl.exp(mine - top), tl.exp(theirs - top)
        total = my_share + their_share
        some = tl.where(total > 0, total, 1.0)
        old = old * (my_share / some)[:, :, None]
        value = value * (their_share / some)[:, :, None]
        joint = tl.where(total > 0, top + tl.log(some), nothing)
        tl.debug_barrier()  # other warps of this program may still read the log-sum-exps
        tl.store(where_lse, joint, mask=of_head)
    value += old
    tl.store(
        where_final, value.to(final.dtype.element_ty), mask=inside & (after == 1)[:, None, None]
    )
    tl.store(where_wide, value, mask=inside & (after == 2)[:, None, None])


@triton.jit(
    do_not_specialize=["num_rows", "delta_stride"], do_not_specialize_on_alignment=["delta"]
)
def _row_sums(
    dout,
    out,
    delta,
    num_rows,
    delta_stride,
    dout_stride,
    out_stride,
    delta_row_stride,
    DOUT_HEAD: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    of_head = (row[:, None] < num_rows) & (head[None, :] < NUM_HEADS)
    inside = of_head[:, :, None] & (column[None, None, :] < DIM)
    rows, heads, columns = row[:, None, None], head[None, :, None], column[None, None, :]
    sum_dtype = delta.dtype.element_ty
    left = tl.load(dout + rows * dout_stride + heads * DOUT_HEAD + columns, mask=inside, other=0.0)
    right = tl.load(out + rows * out_stride + heads * OUT_HEAD + columns, mask=inside, other=0.0)
    total = tl.sum(left.to(sum_dtype) * right.to(sum_dtype), axis=2)
    where = delta + row[:, None] * delta_row_stride + head[None, :].to(tl.int64) * delta_stride
    tl.store(where, total, mask=of_head)


@dataclass(frozen=True, slots=True)
class Table:
    """Chunks `first` to `first + count` of an index array int64[chunks, 8]: the columns of a
    segment, and how many rows of it lie before the chunk."""

    index: Index
    first: int
    count: int


class TritonRowOps:
    """See `RowOps`."""

    def tables(self, segments: Int64, bounds: Int64, arrays: IndexArrays) -> list[Any]:
        """Segments are cut into chunks; all tables are parts of one index array."""
        if len(bounds) < 2:
            return []
        pieces = -(-segments[:, COUNT] // CHUNK)
        before = starts_of(pieces)
        segment = np.repeat(np.arange(len(segments)), pieces)
        skipped = (np.arange(before[-1]) - before[segment]) * CHUNK
        chunks = np.zeros((len(segment), 8), np.int64)
        chunks[:, :6] = segments[segment]
        chunks[:, ROW] += skipped
        chunks[:, COUNT] = np.minimum(chunks[:, COUNT] - skipped, CHUNK)
        chunks[:, 6] = skipped
        index = arrays.add(chunks)
        return [Table(index, a, b - a) for a, b in pairwise(before[bounds].tolist())]

    def pack(self, table: Table, rows: Tensor, message: Tensor) -> None:
        _launch_copy(table, rows, message, True)

    def unpack(self, table: Table, message: Tensor, rows: Tensor) -> None:
        _launch_copy(table, rows, message, False)

    def merge(
        self, table: Table, message: Tensor, message_lse: Tensor, out: Sums, lse: Tensor
    ) -> None:
        _merge(table, message, message_lse, out, lse)

    def add(self, table: Table, message: Tensor, sums: Sums) -> None:
        _merge(table, message, None, sums, None)

    def row_sums(self, dout: Tensor, out: Tensor, delta: Tensor) -> None:
        num_rows, heads, dim = out.shape
        if not num_rows:
            return
        rows, some_heads, columns = _merge_block(heads, dim)
        _row_sums[(triton.cdiv(num_rows, rows), triton.cdiv(heads, some_heads))](
            dout, out, delta, num_rows, delta.stride(1), dout.stride(0), out.stride(0),
            delta.stride(0), _head_stride(dout), _head_stride(out), heads, dim, rows, some_heads,
            columns, num_warps=WARPS,
        )  # fmt: skip


def _launch_copy(table: Table, rows: Tensor, message: Tensor, packs: bool) -> None:
    per_head = rows.ndim == 2
    heads, dim = rows.shape[1], 1 if per_head else rows.shape[2]
    width, columns = heads * dim, _copy_columns(heads * dim)
    copy, flat = (_copy_per_head, False) if per_head else (_copy_rows, _head_stride(rows) == dim)
    copy[(table.count, triton.cdiv(width, columns))](
        table.index.tensor, table.first, rows, message, rows.stride(1), rows.stride(0), width, dim,
        flat, _vector(width, message), packs, CHUNK, columns, num_warps=WARPS,
    )  # fmt: skip


def _head_stride(rows: Tensor) -> int:
    """That of a single head does not matter, and may be any number."""
    return rows.stride(1) if rows.shape[1] > 1 else rows.shape[2]


def _merge(
    table: Table, message: Tensor, message_lse: Tensor | None, sums: Sums, lse: Tensor | None
) -> None:
    final, (_, heads, dim) = sums.final, sums.final.shape
    wide, wide_stride = sums.wide, final.stride(0)
    if wide is None:  # no row is WIDE: any memory will do, it is not looked at
        wide = table.index.tensor.view(accumulator_dtype(final.dtype))
    else:
        wide_stride = wide.stride(0)
    rows, some_heads, columns = _merge_block(heads, dim)
    scores = wide if lse is None else lse  # only its dtype counts where gradients are added
    _merge_rows[(table.count, triton.cdiv(heads, some_heads), CHUNK // rows)](
        table.index.tensor, table.first, final, wide, scores, message,
        scores if message_lse is None else message_lse, scores.stride(1), final.stride(0),
        wide_stride, scores.stride(0), heads, dim, _head_stride(final), lse is not None,
        _vector(heads * dim, message), rows, some_heads, columns, num_warps=WARPS,
    )  # fmt: skip


def _vector(width: int, message: Tensor) -> int:
    """Items that segments of a message are aligned to."""
    item = message.element_size()
    return gcd(width * item, 16) // item


@cache
def _copy_columns(width: int) -> int:
    return min(int(triton.next_power_of_2(width)), COPY_COLUMNS)


@cache
def _merge_block(heads: int, dim: int) -> tuple[int, int, int]:
    """Rows, heads and columns of one program: powers of two; rows divide a chunk."""
    columns = int(triton.next_power_of_2(dim))
    some_heads = min(int(triton.next_power_of_2(heads)), max(1, MERGE_ITEMS // columns))
    rows = min(CHUNK, max(1, MERGE_ITEMS // (columns * some_heads)))
    return rows, some_heads, columns
