"""The kernels of the row operations: one program per chunk of a table, or per chunk and head.

Chunks have the columns of their tables (`row_ops`), with addresses in items instead of bytes.
Chunks of targets have two more columns: SKIPPED, the rows of the entry before the chunk, and SHIFT,
by how many rows the chunk is shifted in its block. The shift makes loads of panels start at
multiples of 16 rows.
"""

import triton
import triton.language as tl

from dyncp.kernels.row_ops import LOG2E, PANEL_ROWS, Copy, Form, Kind, RowSum, Source, Target

# Columns of chunks, and values of their entries, as Triton constants.
C_KIND, C_COUNT, C_WIDTH = (tl.constexpr(int(x)) for x in (Copy.KIND, Copy.COUNT, Copy.WIDTH))
C_SOURCE, C_FROM, C_COLUMN = (tl.constexpr(int(x)) for x in (Copy.SOURCE, Copy.FROM, Copy.COLUMN))
C_FROM_ROW, C_FROM_HEAD = (tl.constexpr(int(x)) for x in (Copy.FROM_ROW, Copy.FROM_HEAD))
C_TO, C_TO_ROW, C_TO_HEAD = (tl.constexpr(int(x)) for x in (Copy.TO, Copy.TO_ROW, Copy.TO_HEAD))
COPY_WIDTH = tl.constexpr(len(Copy))
ZEROS, COPIES, BASE_2 = (tl.constexpr(int(x)) for x in (Kind.ZEROS, Kind.ROWS, Kind.BASE_2))
T_RESULT, T_AT, T_HEAD = (tl.constexpr(int(x)) for x in (Target.RESULT, Target.AT, Target.HEAD))
T_HEADS, T_COUNT, T_LSE = (tl.constexpr(int(x)) for x in (Target.HEADS, Target.COUNT, Target.LSE))
T_FIRST, T_NUM = (tl.constexpr(int(x)) for x in (Target.FIRST, Target.NUM))
T_SKIPPED, T_SHIFT = tl.constexpr(len(Target)), tl.constexpr(len(Target) + 1)
TARGET_WIDTH = tl.constexpr(len(Target) + 2)
S_FORM, S_AT, S_ROW = (tl.constexpr(int(x)) for x in (Source.FORM, Source.AT, Source.ROW))
S_LSE, S_LSE_ROW = (tl.constexpr(int(x)) for x in (Source.LSE, Source.LSE_ROW))
S_LSE_HEAD, S_PANEL_ROW = (tl.constexpr(int(x)) for x in (Source.LSE_HEAD, Source.PANEL_ROW))
S_SCALED, S_CLEARED = (tl.constexpr(int(x)) for x in (Source.SCALED, Source.CLEARED))
SOURCE_WIDTH = tl.constexpr(len(Source))
INPUT, PARTIAL, WIDE = (tl.constexpr(int(x)) for x in (Form.INPUT, Form.PARTIAL, Form.WIDE))
PANELS = tl.constexpr(int(Form.PANELS))
R_ROW, R_HEAD, R_HEADS = (tl.constexpr(int(x)) for x in (RowSum.ROW, RowSum.HEAD, RowSum.HEADS))
R_COUNT, R_PADDED = (tl.constexpr(int(x)) for x in (RowSum.COUNT, RowSum.PADDED))
R_DELTA, R_LSE, R_STRIDE = (tl.constexpr(int(x)) for x in (RowSum.DELTA, RowSum.LSE, RowSum.STRIDE))
ROW_SUM_WIDTH = tl.constexpr(len(RowSum))
CHUNK = tl.constexpr(16)  # rows per program: a quarter of the 64 rows that panels are made of
GROUP_ROWS = tl.constexpr(PANEL_ROWS)
TO_LOG2 = tl.constexpr(LOG2E)
# Strides of the caller's tensors: kernels are not compiled again for their values.
STRIDES = [
    "stride_0", "stride_1", "stride_2", "stride_3", "dout_stride", "out_stride", "lse_row",
    "lse_head",
]  # fmt: skip


@triton.jit
def _aligned(stride, VECTOR: tl.constexpr):
    """`stride` as a multiple of VECTOR, which it is. Triton ignores `multiple_of` on kernel
    arguments."""
    return stride // VECTOR * VECTOR


@triton.jit
def _load_rows(given, stride, row, place, inside, VECTOR: tl.constexpr):
    """Loads rows of one of the caller's tensors."""
    return tl.load(given + row * _aligned(stride, VECTOR) + place, mask=inside, other=0.0)


@triton.jit
def _store_rows(result, stride, row, place, value, inside, VECTOR: tl.constexpr):
    """Stores rows in one of the caller's results."""
    at = result + row * _aligned(stride, VECTOR) + place
    tl.store(at, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _copy_per_head(
    chunk, kind, wide, lse, lse_row, lse_head, ROWS: tl.constexpr, HEADS: tl.constexpr
):
    source = tl.load(chunk + C_SOURCE)
    step = tl.arange(0, ROWS)[:, None].to(tl.int64)
    head = tl.arange(0, HEADS)[None, :].to(tl.int64)
    inside = (step < tl.load(chunk + C_COUNT)) & (head < tl.load(chunk + C_WIDTH))
    where = tl.load(chunk + C_FROM)
    if source < 0:
        place = step * tl.load(chunk + C_FROM_ROW) + head * tl.load(chunk + C_FROM_HEAD)
        value = tl.load(wide + where + place, mask=inside, other=0.0)
    else:
        place = (where + step) * lse_row + (tl.load(chunk + C_COLUMN) + head) * lse_head
        value = tl.load(lse + place, mask=inside, other=0.0)
    if kind == BASE_2:
        value = tl.where(value == float("-inf"), 0.0, value * TO_LOG2)
    target = wide + tl.load(chunk + C_TO) + step * tl.load(chunk + C_TO_ROW)
    tl.store(target + head * tl.load(chunk + C_TO_HEAD), value, mask=inside)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=["lse"])
def copy_chunk(
    table,
    items,
    wide,
    given_0,
    given_1,
    given_2,
    given_3,
    lse,
    stride_0,
    stride_1,
    stride_2,
    stride_3,
    lse_row,
    lse_head,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Copies `COLUMNS` items of a chunk of rows, or the per-head values of a chunk."""
    chunk = table + tl.program_id(0).to(tl.int64) * COPY_WIDTH
    kind = tl.load(chunk + C_KIND)
    begin = tl.program_id(1) * COLUMNS
    if begin < tl.load(chunk + C_WIDTH):
        if (kind == COPIES) | (kind == ZEROS):
            source = tl.load(chunk + C_SOURCE)
            step = tl.arange(0, ROWS)[:, None]
            column = begin + tl.arange(0, COLUMNS)[None, :]
            width = tl.multiple_of(tl.load(chunk + C_WIDTH), VECTOR)
            inside = (step < tl.load(chunk + C_COUNT)) & (column < width)
            place = tl.multiple_of(tl.load(chunk + C_COLUMN), VECTOR) + column
            where = tl.load(chunk + C_FROM)
            value = tl.zeros([ROWS, COLUMNS], items.dtype.element_ty)
            if kind == COPIES:
                row = where + step
                if source < 0:
                    from_row = tl.multiple_of(tl.load(chunk + C_FROM_ROW), VECTOR)
                    own = items + tl.multiple_of(where, VECTOR) + step * from_row
                    value = tl.load(own + column, mask=inside, other=0.0)
                elif source == 0:
                    value = _load_rows(given_0, stride_0, row, place, inside, VECTOR)
                elif source == 1:
                    value = _load_rows(given_1, stride_1, row, place, inside, VECTOR)
                elif source == 2:
                    value = _load_rows(given_2, stride_2, row, place, inside, VECTOR)
                else:
                    value = _load_rows(given_3, stride_3, row, place, inside, VECTOR)
            target = items + tl.multiple_of(tl.load(chunk + C_TO), VECTOR)
            target += step * tl.multiple_of(tl.load(chunk + C_TO_ROW), VECTOR) + column
            tl.store(target, value, mask=inside)
        else:
            _copy_per_head(chunk, kind, wide, lse, lse_row, lse_head, ROWS, HEADS)


@triton.jit
def _panel_places(row, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of 16 rows of panels, [panels, 128], that begin at row `row` of a head, and which
    panels exist."""
    panel = tl.arange(0, PADDED // 8)[:, None]
    step = tl.arange(0, 128)[None, :]
    first = row // GROUP_ROWS * (GROUP_ROWS * DIM) + row % GROUP_ROWS * 8
    return tl.multiple_of(first, 16) + panel * (GROUP_ROWS * 8) + step, panel < DIM // 8


@triton.jit
def _rows_of_panels(quarters, PADDED: tl.constexpr):
    """The numbers at these offsets as rows, [16, dim] (see `panels_to_rows`)."""
    panels = tl.reshape(quarters, [PADDED // 8, 8, 4, 2, 2])
    return tl.reshape(tl.permute(panels, [3, 1, 0, 2, 4]), [CHUNK, PADDED])


@triton.jit
def _contribution(
    chunk,
    source,
    items,
    partial,
    wide,
    row,
    head,
    inside,
    scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SUMS_DIM: tl.constexpr,
    ONLY_INPUT: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One contribution in the accumulator dtype, [16, dim]. All columns of its entry are loaded
    before the first one is used, so that the loads overlap."""
    at = tl.load(source + S_AT)
    of_row = tl.load(source + S_ROW)
    form = tl.load(source + S_FORM)
    scaled = tl.load(source + S_SCALED)
    cleared = tl.load(source + S_CLEARED)
    first_row = tl.load(source + S_PANEL_ROW)
    first_row += tl.load(chunk + T_SKIPPED) - tl.load(chunk + T_SHIFT)
    column = tl.arange(0, PADDED)[None, :]
    place = row[:, None] * tl.multiple_of(of_row, VECTOR) + head * DIM + column
    place += tl.multiple_of(at, VECTOR)
    value = tl.zeros([CHUNK, PADDED], wide.dtype.element_ty)
    if ONLY_INPUT:
        value = tl.load(items + place, mask=inside, other=0.0).to(wide.dtype.element_ty)
    else:
        if form == INPUT:
            value = tl.load(items + place, mask=inside, other=0.0).to(wide.dtype.element_ty)
        elif form == PARTIAL:
            value = tl.load(partial + place, mask=inside, other=0.0).to(wide.dtype.element_ty)
        elif form == WIDE:
            value = tl.load(wide + place, mask=inside, other=0.0)
        elif SUMS_DIM > 0:
            flat, known = _panel_places(first_row, SUMS_DIM, PADDED)
            sums = wide + tl.multiple_of(at + head.to(tl.int64) * of_row, 16) + flat
            loaded = tl.load(sums, mask=known, other=0.0)
            value = _rows_of_panels(loaded, PADDED)
            if cleared != 0:
                tl.debug_barrier()  # other warps of this program may still read the sums
                tl.store(sums, tl.zeros_like(loaded), mask=known)
        if scaled != 0:
            value = value * scale
    return value


@triton.jit
def _merged(total, scores, value, new):
    """The merged output and its log-sum-exp. A side that attended nothing has log-sum-exp −∞ and
    share 0, even if both sides have."""
    top = tl.maximum(scores, new)
    top = tl.where(top == float("-inf"), 0.0, top)
    share, new_share = tl.exp(scores - top), tl.exp(new - top)
    both = share + new_share
    some = tl.where(both > 0, both, 1.0)
    total = total * (share / some)[:, None] + value * (new_share / some)[:, None]
    return total, tl.where(both > 0, top + tl.log(some), float("-inf"))


@triton.jit(do_not_specialize=[*STRIDES, "scale"], do_not_specialize_on_alignment=["lse"])
def combine_chunk(
    targets,
    sources,
    items,
    partial,
    wide,
    result_0,
    result_1,
    result_2,
    lse,
    stride_0,
    stride_1,
    stride_2,
    lse_row,
    lse_head,
    scale,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SUMS_DIM: tl.constexpr,
    HAS_LSE: tl.constexpr,
    ONLY_INPUT: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Adds up the contributions to a chunk of up to 16 rows of one head. Row i of the block is row
    i − shift of the chunk."""
    chunk = targets + tl.program_id(0).to(tl.int64) * TARGET_WIDTH
    head = tl.program_id(1)
    first = tl.load(chunk + T_FIRST)
    num_sources = tl.load(chunk + T_NUM)
    row = tl.arange(0, CHUNK) - tl.load(chunk + T_SHIFT)
    exists = (row >= 0) & (row < tl.load(chunk + T_COUNT))
    row = row + tl.load(chunk + T_SKIPPED)  # of the entry
    if head < tl.load(chunk + T_HEADS):
        column = tl.arange(0, PADDED)[None, :]
        inside = exists[:, None] & (column < DIM)
        total = tl.zeros([CHUNK, PADDED], wide.dtype.element_ty)
        scores = tl.full([CHUNK], float("-inf"), wide.dtype.element_ty)
        for i in range(num_sources):
            source = sources + (first + i) * SOURCE_WIDTH
            value = _contribution(
                chunk, source, items, partial, wide, row, head, inside, scale,
                DIM, PADDED, SUMS_DIM, ONLY_INPUT, VECTOR,
            )  # fmt: skip
            if HAS_LSE:
                theirs = wide + tl.load(source + S_LSE) + row * tl.load(source + S_LSE_ROW)
                theirs += head * tl.load(source + S_LSE_HEAD)
                new = tl.load(theirs, mask=exists, other=float("-inf"))
                total, scores = _merged(total, scores, value, new)
            else:
                total += value
        result = tl.load(chunk + T_RESULT)
        to = tl.load(chunk + T_AT)
        to_head = tl.load(chunk + T_HEAD) + head
        if result < 0:  # into a message
            message = partial + tl.multiple_of(to, VECTOR) + head * DIM + column
            message += row[:, None] * tl.multiple_of(tl.load(chunk + T_HEADS) * DIM, VECTOR)
            tl.store(message, total.to(partial.dtype.element_ty), mask=inside)
        else:
            to_row, place = (to + row)[:, None], to_head * DIM + column
            if result == 0:
                _store_rows(result_0, stride_0, to_row, place, total, inside, VECTOR)
            elif result == 1:
                _store_rows(result_1, stride_1, to_row, place, total, inside, VECTOR)
            else:
                _store_rows(result_2, stride_2, to_row, place, total, inside, VECTOR)
        if HAS_LSE:
            if result < 0:
                own = tl.load(chunk + T_LSE) + row * tl.load(chunk + T_HEADS) + head
                tl.store(wide + own, scores, mask=exists)
            else:
                own = (to + row) * lse_row + to_head * lse_head
                tl.store(lse + own, scores, mask=exists)


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=["lse"])
def row_sums_of_chunk(
    table,
    wide,
    dout,
    out,
    lse,
    dout_stride,
    out_stride,
    lse_row,
    lse_head,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    LOG2: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Row sums of dO·O and log-sum-exps of a chunk of up to 16 rows of one head."""
    chunk = table + tl.program_id(0).to(tl.int64) * ROW_SUM_WIDTH
    own_head = tl.program_id(1)
    head = tl.load(chunk + R_HEAD) + own_head
    step = tl.arange(0, CHUNK).to(tl.int64)
    exists = step < tl.load(chunk + R_COUNT)
    row = tl.load(chunk + R_ROW) + step
    if own_head < tl.load(chunk + R_HEADS):
        column = tl.arange(0, PADDED)[None, :]
        inside = exists[:, None] & (column < DIM)
        place = head * DIM + column
        left = _load_rows(dout, dout_stride, row[:, None], place, inside, VECTOR)
        right = _load_rows(out, out_stride, row[:, None], place, inside, VECTOR)
        sums = tl.sum(left.to(wide.dtype.element_ty) * right.to(wide.dtype.element_ty), axis=1)
        scores = tl.load(lse + row * lse_row + head * lse_head, mask=exists, other=float("inf"))
        if LOG2:
            scores = tl.where(scores == float("-inf"), 0.0, scores * TO_LOG2)
        to = own_head * tl.load(chunk + R_STRIDE) + step
        stored = step < tl.load(chunk + R_PADDED)
        tl.store(wide + tl.load(chunk + R_DELTA) + to, sums, mask=stored)
        tl.store(wide + tl.load(chunk + R_LSE) + to, scores, mask=stored)
