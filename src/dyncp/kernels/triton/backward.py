"""Backward: dQ by query tiles, then dK and dV by key tiles. No atomics, so the same bits always."""

import triton
import triton.language as tl

from dyncp.kernels.triton.forward import (
    HALF,
    LOG2E,
    SIDE,
    between,
    choose_tile,
    in_ranges,
    load_block,
)


@triton.jit
def _safe(lse, rows, num_rows):
    """Log-sum-exps in base 2; rows that attend nothing, or do not exist, get weight 0."""
    return tl.where((rows < num_rows) & (lse != float("-inf")), lse * LOG2E, float("inf"))


@triton.jit
def _store_sums(
    value, final_pointer, wide_pointer, states, rows, num_rows, final_stride, wide_stride,
    DIM: tl.constexpr, PADDED: tl.constexpr, MERGES: tl.constexpr,
):  # fmt: skip
    """Adds rows to their sums, as their states say."""
    columns = tl.arange(0, PADDED)
    is_column = columns[None, :] < DIM
    after = tl.load(states + num_rows + rows, mask=rows < num_rows, other=3)
    final_at = final_pointer + rows.to(tl.int64)[:, None] * final_stride + columns[None, :]
    wide_at = wide_pointer + rows.to(tl.int64)[:, None] * wide_stride + columns[None, :]
    if MERGES:
        before = tl.load(states + rows, mask=rows < num_rows, other=0)
        value += tl.load(final_at, mask=(before == 1)[:, None] & is_column, other=0.0).to(
            tl.float32
        )
        value += tl.load(wide_at, mask=(before == 2)[:, None] & is_column, other=0.0)
        tl.store(wide_at, value, mask=(after == 2)[:, None] & is_column)
    tl.store(
        final_at,
        value.to(final_pointer.dtype.element_ty),
        mask=(after == 1)[:, None] & is_column,
    )


@triton.jit
def _add_dq(
    dq, q, dout, lse, delta, k, v, scale_log2, allowed, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    weights = tl.exp2(scores * scale_log2 - lse[:, None])
    if MASKED:
        weights = tl.where(allowed, weights, 0.0)
    dweights = tl.dot(dout, v.T, input_precision=PRECISION)
    dscores = weights * (dweights - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=[
        "num_rows", "lse_stride", "delta_stride", "range_stride", "most_runs", "most_partial",
        "num_tiles", "num_heavy", "num_heads",
    ],
    do_not_specialize_on_alignment=["lse_pointer", "delta_pointer"],
)  # fmt: skip
def attend_backward_queries(
    q_matrix,
    k_matrix,
    v_matrix,
    dout_matrix,
    lse_pointer,
    delta_pointer,
    final_pointer,
    wide_pointer,
    lse_stride,
    delta_stride,
    final_stride,
    wide_stride,
    scale,
    num_rows,
    num_tiles,
    num_heavy,
    num_heads,
    order,
    run_count,
    runs,
    partial_count,
    partial,
    ranges,
    range_stride,
    states,
    most_runs,
    most_partial,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    MERGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, head, part = choose_tile(order, num_tiles, num_heavy, num_heads, SIDE // BLOCK_M)
    kv_head = head // GROUP
    first_row = tile * SIDE + part * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    scale_log2 = scale * LOG2E
    q = load_block(q_matrix, first_row, head, DIM, PADDED)
    dout = load_block(dout_matrix, first_row, head, DIM, PADDED)
    lse = tl.load(lse_pointer + head * lse_stride + rows, mask=rows < num_rows, other=0.0)
    lse = _safe(lse, rows, num_rows)
    delta = tl.load(delta_pointer + head * delta_stride + rows, mask=rows < num_rows, other=0.0)
    dq = tl.zeros([BLOCK_M, PADDED], tl.float32)

    for run in range(tl.load(run_count + tile)):
        first = tl.load(runs + (tile * most_runs + run) * 2) * SIDE
        end = tl.load(runs + (tile * most_runs + run) * 2 + 1) * SIDE
        for start in range(first, end, BLOCK_N):
            k = k_matrix.load([start, kv_head * DIM])
            v = v_matrix.load([start, kv_head * DIM])
            dq = _add_dq(dq, q, dout, lse, delta, k, v, scale_log2, True, False, PRECISION)

    pieces: tl.constexpr = SIDE // BLOCK_N
    for piece in range(tl.load(partial_count + tile) * pieces):
        listed = piece // pieces
        k_tile = tl.load(partial + tile * most_partial + listed)
        start = k_tile * SIDE + (piece - listed * pieces) * BLOCK_N
        k = k_matrix.load([start, kv_head * DIM])
        v = v_matrix.load([start, kv_head * DIM])
        keys = start + tl.arange(0, BLOCK_N)
        allowed = in_ranges(ranges, range_stride, rows, keys, NUM_RANGES, False)
        dq = _add_dq(dq, q, dout, lse, delta, k, v, scale_log2, allowed, True, PRECISION)

    _store_sums(
        dq * scale, final_pointer + head * DIM, wide_pointer + head * DIM, states, rows, num_rows,
        final_stride, wide_stride, DIM, PADDED, MERGES,
    )  # fmt: skip


@triton.jit
def _in_ranges_of(ranges_vector, range_stride, start, keys, NUM_RANGES: tl.constexpr):
    """bool[keys, rows] for the rows from `start` on."""
    first = ranges_vector.load([start])
    allowed = between(keys, first, ranges_vector.load([range_stride + start]), True)
    for r in tl.static_range(1, NUM_RANGES):
        first = ranges_vector.load([2 * r * range_stride + start])
        end = ranges_vector.load([(2 * r + 1) * range_stride + start])
        allowed |= between(keys, first, end, True)
    return allowed


@triton.jit
def _add_dkv(
    dk, dv, k, v, q, dout, lse, delta, scale_log2, allowed, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All transposed, [keys, rows], so that the weights feed the next product as they are."""
    scores = tl.dot(k, q.T, input_precision=PRECISION)
    weights = tl.exp2(scores * scale_log2 - lse[None, :])
    if MASKED:
        weights = tl.where(allowed, weights, 0.0)
    dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dweights = tl.dot(v, dout.T, input_precision=PRECISION)
    dscores = weights * (dweights - delta[None, :])
    dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_keys", "lse_stride", "delta_stride", "range_stride", "most_runs",
        "most_partial", "num_tiles", "num_heavy", "num_heads",
    ]
)  # fmt: skip
def attend_backward_keys(
    q_matrix,
    k_matrix,
    v_matrix,
    dout_matrix,
    lse_vector,
    delta_vector,
    dk_pointer,
    dv_pointer,
    wide_dk_pointer,
    wide_dv_pointer,
    lse_stride,
    delta_stride,
    dk_stride,
    dv_stride,
    wide_stride,
    scale,
    num_rows,
    num_keys,
    num_tiles,
    num_heavy,
    num_heads,
    order,
    run_count,
    runs,
    partial_count,
    partial,
    ranges_vector,
    range_stride,
    states,
    most_runs,
    most_partial,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    MERGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile, kv_head, part = choose_tile(order, num_tiles, num_heavy, num_heads, HALF // BLOCK_N)
    first_key = tile * HALF + part * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    scale_log2 = scale * LOG2E
    k = load_block(k_matrix, first_key, kv_head, DIM, PADDED)
    v = load_block(v_matrix, first_key, kv_head, DIM, PADDED)
    dk = tl.zeros([BLOCK_N, PADDED], tl.float32)
    dv = tl.zeros([BLOCK_N, PADDED], tl.float32)

    num_runs = tl.load(run_count + tile)
    pieces: tl.constexpr = HALF // BLOCK_M
    num_pieces = tl.load(partial_count + tile) * pieces
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        lse_start = head * lse_stride
        delta_start = head * delta_stride
        for run in range(num_runs):
            first = tl.load(runs + (tile * most_runs + run) * 2) * HALF
            end = tl.load(runs + (tile * most_runs + run) * 2 + 1) * HALF
            for start in range(first, end, BLOCK_M):
                q = q_matrix.load([start, head * DIM])
                lse = lse_vector.load([lse_start + start]) * LOG2E
                dout = dout_matrix.load([start, head * DIM])
                delta = delta_vector.load([delta_start + start])
                dk, dv = _add_dkv(
                    dk, dv, k, v, q, dout, lse, delta, scale_log2, True, False, PRECISION
                )
        for piece in range(num_pieces):
            listed = piece // pieces
            q_tile = tl.load(partial + tile * most_partial + listed)
            start = q_tile * HALF + (piece - listed * pieces) * BLOCK_M
            rows = start + tl.arange(0, BLOCK_M)
            q = q_matrix.load([start, head * DIM])
            dout = dout_matrix.load([start, head * DIM])
            lse = _safe(lse_vector.load([lse_start + start]), rows, num_rows)
            delta = tl.where(rows < num_rows, delta_vector.load([delta_start + start]), 0.0)
            allowed = _in_ranges_of(ranges_vector, range_stride, start, keys, NUM_RANGES)
            dk, dv = _add_dkv(
                dk, dv, k, v, q, dout, lse, delta, scale_log2, allowed, True, PRECISION
            )

    _store_sums(
        dk * scale, dk_pointer + kv_head * DIM, wide_dk_pointer + kv_head * DIM, states, keys,
        num_keys, dk_stride, wide_stride, DIM, PADDED, MERGES,
    )  # fmt: skip
    _store_sums(
        dv, dv_pointer + kv_head * DIM, wide_dv_pointer + kv_head * DIM, states, keys,
        num_keys, dv_stride, wide_stride, DIM, PADDED, MERGES,
    )  # fmt: skip
