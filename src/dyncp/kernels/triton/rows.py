"""Row operations in Triton: one launch for all segments of a table.

Where a table has segments of two tensors, kernels get the first and, in items, the gap to the
second. Results for the same rows are added by one program, one after the other.

Sizes and strides are plain arguments, and those that change from batch to batch are never
specialised on; only head counts, dimensions and dtypes compile anew. A row's column c lies at
`row × row stride + (c // dim) × head stride + c % dim`, which also describes log-sum-exps that lie
heads first: they have dim 1.
"""

from collections.abc import Sequence
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
from dyncp.kernels.row_ops import COUNT, ROW, WHICH

CHUNK = 16  # rows of one program
CHUNK_COLUMNS = 9
STRIDE = tl.constexpr(CHUNK_COLUMNS)
COPY_COLUMNS = 1024  # of one program
MERGE_ITEMS = 4096  # of one program: rows × heads × dim, held in registers in fp32
WARPS = 4


def _copy(
    table,
    first,
    rows,
    message,
    head_stride,
    gap: tl.int64,
    only,
    row_stride,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    FLAT: tl.constexpr,
    VECTOR: tl.constexpr,
    PACKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    chunk = table + (first + tl.program_id(0)) * STRIDE
    row = tl.load(chunk)
    offset = tl.multiple_of(tl.load(chunk + 1), VECTOR)
    which = tl.load(chunk + 6)
    count = tl.where((only < 0) | (which == only), tl.load(chunk + 2), 0)
    skipped = tl.load(chunk + 7)
    step = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (step < count) & (column < WIDTH)
    own = rows + tl.multiple_of(which * gap, VECTOR)
    if FLAT:
        own += (row + step) * row_stride + column
    else:
        own += (row + step) * row_stride
        own += (column // DIM).to(tl.int64) * head_stride + column % DIM
    other = message + offset + (skipped + step) * WIDTH + column
    if PACKS:
        tl.store(other, tl.load(own, mask=inside).to(message.dtype.element_ty), mask=inside)
    else:
        tl.store(own, tl.load(other, mask=inside).to(rows.dtype.element_ty), mask=inside)


_copy_rows = triton.jit(_copy, do_not_specialize=["first", "head_stride", "gap", "only"])
# Virtual ranks' log-sum-exps begin anywhere, and are few: one kernel for any alignment.
_copy_per_head = triton.jit(
    _copy,
    do_not_specialize=["first", "head_stride", "gap", "only"],
    do_not_specialize_on_alignment=["rows"],
)


@triton.jit
def _share(mine, my_lse, theirs, their_lse):
    """Both outputs times their shares of the joint one, and its log-sum-exp. Rows that attended
    nothing have log-sum-exp −∞ and share 0, also when both sides have."""
    nothing = float("-inf")
    top = tl.maximum(my_lse, their_lse)
    top = tl.where(top == nothing, 0.0, top)
    my_share, their_share = tl.exp(my_lse - top), tl.exp(their_lse - top)
    total = my_share + their_share
    some = tl.where(total > 0, total, 1.0)
    mine = mine * (my_share / some)[:, :, None]
    theirs = theirs * (their_share / some)[:, :, None]
    return mine, theirs, tl.where(total > 0, top + tl.log(some), nothing)


@triton.jit(
    do_not_specialize=["first", "lse_stride", "final_gap", "wide_gap"],
    do_not_specialize_on_alignment=["lse", "message_lse"],
)
def _merge_rows(
    table,
    chains,
    first,
    final,
    wide,
    lse,
    message,
    message_lse,
    lse_stride,
    final_gap: tl.int64,
    wide_gap: tl.int64,
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
    """Merges partial outputs by their log-sum-exps, or (without HAS_LSE) adds gradients: those of a
    chain of chunks for the same rows, in its order."""
    start = tl.load(chains + first + tl.program_id(0))
    chunk = table + start * STRIDE
    row = tl.load(chunk)
    count = tl.load(chunk + 2)
    before = tl.load(chunk + 3 + tl.zeros([ROWS], tl.int32))  # one number; masks need a tensor
    length = tl.load(chunk + 8)
    step = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)
    of_head = (step[:, None] < count) & (head[None, :] < NUM_HEADS)
    inside = of_head[:, :, None] & (column[None, None, :] < DIM)
    place = head[None, :, None] * DIM + column[None, None, :]
    where_final = final + (row + step)[:, None, None] * final_stride
    where_final += head[None, :, None] * FINAL_HEAD + column[None, None, :]
    where_wide = wide + (row + step)[:, None, None] * wide_stride + place
    if not HAS_LSE:
        which = tl.load(chunk + 6)
        where_final += tl.multiple_of(which * final_gap, VECTOR)
        where_wide += tl.multiple_of(which * wide_gap, VECTOR)
    sum_dtype = lse.dtype.element_ty
    total = tl.load(where_final, mask=inside & (before == 1)[:, None, None], other=0.0)
    total = total.to(sum_dtype)
    total += tl.load(where_wide, mask=inside & (before == 2)[:, None, None], other=0.0)
    where_lse = lse + (row + step)[:, None] * lse_row_stride
    where_lse += head[None, :].to(tl.int64) * lse_stride
    nothing = float("-inf")
    mine = tl.full([ROWS, HEADS], nothing, sum_dtype)
    if HAS_LSE:
        mine = tl.load(where_lse, mask=of_head & (before != 0)[:, None], other=nothing)
    for i in range(length):
        other = chunk + i * STRIDE
        offset = tl.multiple_of(tl.load(other + 1), VECTOR)
        of_segment = step + tl.load(other + 7)
        new = message + offset + of_segment[:, None, None] * (NUM_HEADS * DIM) + place
        value = tl.load(new, mask=inside, other=0.0).to(sum_dtype)
        if HAS_LSE:
            new_lse = message_lse + tl.load(other + 5) + of_segment[:, None] * NUM_HEADS
            theirs = tl.load(new_lse + head[None, :], mask=of_head, other=nothing)
            total, value, mine = _share(total, mine, value, theirs)
        total += value
    if HAS_LSE:
        tl.debug_barrier()  # other warps of this program may still read the log-sum-exps
        tl.store(where_lse, mine, mask=of_head)
    after = tl.load(chunk + (length - 1) * STRIDE + 4 + tl.zeros([ROWS], tl.int32))
    tl.store(
        where_final, total.to(final.dtype.element_ty), mask=inside & (after == 1)[:, None, None]
    )
    tl.store(where_wide, total, mask=inside & (after == 2)[:, None, None])


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
    """Chunks `first` to `first + count` of an index array int64[chunks, 9]: the columns of a
    segment, how many rows of it lie before the chunk, and how many chunks of the same rows begin
    here. `chains` has the first of each of these."""

    index: Index
    first: int
    count: int
    chains: Index
    first_chain: int
    num_chains: int


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
        chunks = np.zeros((len(segment), CHUNK_COLUMNS), np.int64)
        chunks[:, :7] = segments[segment]
        chunks[:, ROW] += skipped
        chunks[:, COUNT] = np.minimum(chunks[:, COUNT] - skipped, CHUNK)
        chunks[:, 7] = skipped
        ends = before[bounds]
        chunks, chains = _chained(chunks, np.repeat(np.arange(len(ends) - 1), np.diff(ends)))
        index, starts = arrays.add(chunks), arrays.add(chains)
        chain_ends = np.searchsorted(chains, ends).tolist()
        parts = zip(pairwise(ends.tolist()), pairwise(chain_ends), strict=True)
        return [Table(index, a, b - a, starts, c, d - c) for (a, b), (c, d) in parts]

    def pack(self, table: Table, rows: Sequence[Tensor], message: Tensor) -> None:
        _copy_all(table, rows, message, True)

    def unpack(self, table: Table, message: Tensor, rows: Sequence[Tensor]) -> None:
        _copy_all(table, rows, message, False)

    def merge(
        self, table: Table, message: Tensor, message_lse: Tensor, out: Sums, lse: Tensor
    ) -> None:
        _merge(table, message, message_lse, [out], lse)

    def add(self, table: Table, message: Tensor, sums: Sequence[Sums]) -> None:
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


def _chained(chunks: Int64, table: Int64) -> tuple[Int64, Int64]:
    """The chunks of every table ordered so that those of the same rows follow each other, in their
    order, and where such chains begin."""
    key = np.stack([table, chunks[:, WHICH], chunks[:, ROW]])
    order = np.lexsort(key[::-1])
    chunks, key = chunks[order], key[:, order]
    starts = np.flatnonzero(np.append(True, (np.diff(key) != 0).any(axis=0))[: len(chunks)])
    chunks[starts, 8] = np.diff(np.append(starts, len(chunks)))
    return chunks, starts


def _copy_all(table: Table, rows: Sequence[Tensor], message: Tensor, packs: bool) -> None:
    """In one launch where tensors lie alike."""
    first, last = rows[0], rows[-1]
    if first.stride() == last.stride():
        _launch_copy(table, first, message, packs, _gap(first, last), -1)
        return
    for which, own in enumerate(rows):
        _launch_copy(table, own, message, packs, 0, which)


def _gap(first: Tensor, second: Tensor) -> int:
    """Items from one to the other."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size()


def _launch_copy(
    table: Table, rows: Tensor, message: Tensor, packs: bool, gap: int, only: int
) -> None:
    per_head = rows.ndim == 2
    heads, dim = rows.shape[1], 1 if per_head else rows.shape[2]
    width, columns = heads * dim, _copy_columns(heads * dim)
    copy, flat = (_copy_per_head, False) if per_head else (_copy_rows, _head_stride(rows) == dim)
    copy[(table.count, triton.cdiv(width, columns))](
        table.index.tensor, table.first, rows, message, rows.stride(1), gap, only, rows.stride(0),
        width, dim, flat, _vector(width, message, gap), packs, CHUNK, columns, num_warps=WARPS,
    )  # fmt: skip


def _head_stride(rows: Tensor) -> int:
    """That of a single head does not matter, and may be any number."""
    return rows.stride(1) if rows.shape[1] > 1 else rows.shape[2]


def _merge(
    table: Table,
    message: Tensor,
    message_lse: Tensor | None,
    sums: Sequence[Sums],
    lse: Tensor | None,
) -> None:
    final, (_, heads, dim) = sums[0].final, sums[0].final.shape
    assert final.stride() == sums[-1].final.stride(), "two sums in one table lie alike"
    wide, wide_stride, wide_gap = sums[0].wide, final.stride(0), 0
    if wide is None:  # no row is WIDE: any memory will do, it is not looked at
        wide = table.index.tensor.view(accumulator_dtype(final.dtype))
    else:
        last = sums[-1].wide
        assert last is not None, "of two sums, both are wide or none"
        assert last.stride() == wide.stride(), "two wide sums in one table lie alike"
        wide_stride, wide_gap = wide.stride(0), _gap(wide, last)
    rows, some_heads, columns = _merge_block(heads, dim)
    # Where gradients are added, only the dtype of log-sum-exps counts.
    scores, strides = (wide, (1, 1)) if lse is None else (lse, lse.stride())
    gap = _gap(final, sums[-1].final)
    _merge_rows[(table.num_chains, triton.cdiv(heads, some_heads), CHUNK // rows)](
        table.index.tensor, table.chains.tensor, table.first_chain, final, wide, scores, message,
        scores if message_lse is None else message_lse, strides[1], gap, wide_gap,
        final.stride(0), wide_stride, strides[0], heads, dim, _head_stride(final),
        lse is not None, _vector(heads * dim, message, gap, wide_gap), rows, some_heads, columns,
        num_warps=WARPS,
    )  # fmt: skip


def _vector(width: int, message: Tensor, *gaps: int) -> int:
    """Items that segments of a message, and the second of two tensors, are aligned to."""
    item = message.element_size()
    return gcd(width * item, 16, *(gap * item for gap in gaps)) // item


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
