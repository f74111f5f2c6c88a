"""The three attention kernels. They use no atomics, so results are the same bits every time.

Forward and dQ run one program per query tile and head: it loops over the runs of full key tiles,
then over the partial ones. dK and dV run one program per key tile and kv head, which loops over the
query tiles of all its q heads in the same way.

Every program reads the entry of its tile (`TileLists`): tile, number of runs, number of partial
tiles, runs, partial tiles.
"""

import triton
import triton.language as tl

from dyncp.kernels import row_ops, tile_lists

LOG2E = tl.constexpr(row_ops.LOG2E)
LN2 = tl.constexpr(0.6931471805599453)
SIDE = tl.constexpr(tile_lists.SIDE)
HALF = tl.constexpr(tile_lists.HALF)
RUNS = tl.constexpr(3)  # first column of runs in an entry
# Arguments that change from batch to batch: kernels are not compiled again for their values.
CHANGING = [
    "num_rows", "num_keys", "num_tiles", "num_heavy", "num_heads", "lse_stride", "delta_stride",
    "range_stride", "list_width", "most_runs",
]  # fmt: skip


@triton.jit
def _choose_entry(
    lists, list_width, num_tiles, num_heavy, num_heads, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """The list entry and head of this program, and the first of its BLOCK rows. Heavy tiles start
    first, for all heads; the others follow head by head, so that a head's keys stay in the
    cache."""
    parts: tl.constexpr = TILE // BLOCK
    program = tl.program_id(0)
    part = program % parts
    program = program // parts
    if program < num_heavy * num_heads:
        place = program // num_heads
        head = program % num_heads
    else:
        program -= num_heavy * num_heads
        place = num_heavy + program % (num_tiles - num_heavy)
        head = program // (num_tiles - num_heavy)
    entry = lists + place * list_width
    return entry, head, tl.load(entry) * TILE + part * BLOCK


@triton.jit
def _piece_start(partial, piece, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """First row of a piece, where the listed partial tiles are cut into pieces of BLOCK rows."""
    pieces: tl.constexpr = TILE // BLOCK
    listed = piece // pieces
    return tl.load(partial + listed) * TILE + (piece - listed * pieces) * BLOCK


@triton.jit
def _load_block(matrix, first_row, head, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of one head of a [rows, heads × DIM] descriptor; columns from DIM on are 0."""
    block = matrix.load([first_row, head * DIM])
    if PADDED != DIM:  # these columns belong to the next head
        block = tl.where(tl.arange(0, PADDED)[None, :] < DIM, block, 0.0)
    return block


@triton.jit
def _in_ranges(ranges, range_stride, rows, keys, NUM_RANGES: tl.constexpr):
    """bool[rows, keys]: whether the key row is in one of the query row's ranges."""
    allowed = tl.zeros([rows.shape[0], keys.shape[0]], tl.int1)
    for r in tl.static_range(NUM_RANGES):
        start = tl.load(ranges + 2 * r * range_stride + rows)[:, None]
        end = tl.load(ranges + (2 * r + 1) * range_stride + rows)[:, None]
        allowed |= (keys[None, :] >= start) & (keys[None, :] < end)
    return allowed


@triton.jit
def _in_ranges_transposed(
    ranges_vector, range_stride, start, keys, BLOCK: tl.constexpr, NUM_RANGES: tl.constexpr
):
    """The same as bool[keys, rows], for the BLOCK query rows that begin at `start`."""
    allowed = tl.zeros([keys.shape[0], BLOCK], tl.int1)
    for r in tl.static_range(NUM_RANGES):
        first = ranges_vector.load([2 * r * range_stride + start])[None, :]
        end = ranges_vector.load([(2 * r + 1) * range_stride + start])[None, :]
        allowed |= (keys[:, None] >= first) & (keys[:, None] < end)
    return allowed


@triton.jit
def _online_softmax(
    scores, accumulator, row_sum, row_max, v, scale_log2, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one piece of scores to the running softmax. Maxima are those of scaled scores in base
    2."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = new_max
    if MASKED:  # a row may not have attended any key yet
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
    return accumulator, row_sum, new_max


@triton.jit
def _store_rows(
    value, lse, final_pointer, wide_pointer, lse_pointer, states, rows, num_rows, final_stride,
    wide_stride, DIM: tl.constexpr, PADDED: tl.constexpr, MERGES: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Adds the new values of one head's rows to the sums that `before` points to, and stores the
    totals where `after` points to. With log-sum-exps, outputs are merged instead of added."""
    columns = tl.arange(0, PADDED)[None, :]
    is_column = columns < DIM
    final_at = final_pointer + rows.to(tl.int64)[:, None] * final_stride + columns
    wide_at = wide_pointer + rows.to(tl.int64)[:, None] * wide_stride + columns
    after = tl.load(states + num_rows + rows, mask=rows < num_rows, other=3)
    if MERGES:
        before = tl.load(states + rows, mask=rows < num_rows, other=0)
        held = tl.load(final_at, mask=(before == 1)[:, None] & is_column, other=0.0).to(tl.float32)
        held += tl.load(wide_at, mask=(before == 2)[:, None] & is_column, other=0.0)
        if HAS_LSE:
            held_lse = tl.load(lse_pointer + rows, mask=before != 0, other=float("-inf"))
            largest = tl.maximum(held_lse, lse)
            shift = tl.where(largest == float("-inf"), 0.0, largest)
            held_share = tl.exp2((held_lse - shift) * LOG2E)
            share = tl.exp2((lse - shift) * LOG2E)
            total = held_share + share
            scaled = 1.0 / tl.where(total > 0, total, 1.0)
            value = value * (share * scaled)[:, None] + held * (held_share * scaled)[:, None]
            lse = tl.where(total > 0, shift + tl.log2(total) * LN2, float("-inf"))
        else:
            value += held
        tl.store(wide_at, value, mask=(after == 2)[:, None] & is_column)
        if HAS_LSE:
            tl.debug_barrier()  # all warps must read a row's log-sum-exp before one replaces it
    final = value.to(final_pointer.dtype.element_ty)
    tl.store(final_at, final, mask=(after == 1)[:, None] & is_column)
    if HAS_LSE:
        tl.store(lse_pointer + rows, lse, mask=after != 3)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=["lse_pointer"])
def attend_tiles(
    q_matrix,
    k_matrix,
    v_matrix,
    final_pointer,
    wide_pointer,
    lse_pointer,
    final_stride,
    wide_stride,
    lse_stride,
    scale_log2,
    num_rows,
    num_tiles,
    num_heavy,
    num_heads,
    lists,
    list_width,
    most_runs,
    ranges,
    range_stride,
    states,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    MERGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    entry, head, first_row = _choose_entry(
        lists, list_width, num_tiles, num_heavy, num_heads, SIDE, BLOCK_M
    )
    kv_head = head // GROUP
    rows = first_row + tl.arange(0, BLOCK_M)
    q = _load_block(q_matrix, first_row, head, DIM, PADDED)
    accumulator = tl.zeros([BLOCK_M, PADDED], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)

    runs = entry + RUNS
    for run in range(tl.load(entry + 1)):
        first = tl.load(runs + run * 2) * SIDE
        end = tl.load(runs + run * 2 + 1) * SIDE
        for start in range(first, end, BLOCK_N):
            k = k_matrix.load([start, kv_head * DIM])
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            v = v_matrix.load([start, kv_head * DIM])
            accumulator, row_sum, row_max = _online_softmax(
                scores, accumulator, row_sum, row_max, v, scale_log2, False, PRECISION
            )

    partial = runs + most_runs * 2
    for piece in range(tl.load(entry + 2) * (SIDE // BLOCK_N)):
        start = _piece_start(partial, piece, SIDE, BLOCK_N)
        k = k_matrix.load([start, kv_head * DIM])
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        keys = start + tl.arange(0, BLOCK_N)
        allowed = _in_ranges(ranges, range_stride, rows, keys, NUM_RANGES)
        scores = tl.where(allowed, scores, float("-inf"))
        v = v_matrix.load([start, kv_head * DIM])
        accumulator, row_sum, row_max = _online_softmax(
            scores, accumulator, row_sum, row_max, v, scale_log2, True, PRECISION
        )

    attended = row_sum > 0
    accumulator = accumulator / tl.where(attended, row_sum, 1.0)[:, None]
    lse = tl.where(attended, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
    _store_rows(
        accumulator, lse, final_pointer + head * DIM, wide_pointer + head * DIM,
        lse_pointer + head * lse_stride, states, rows, num_rows, final_stride, wide_stride,
        DIM, PADDED, MERGES, True,
    )  # fmt: skip


@triton.jit
def _safe(lse, rows, num_rows):
    """Log-sum-exps in base 2, +∞ for rows that attend nothing or do not exist: their weights become
    0."""
    return tl.where((rows < num_rows) & (lse != float("-inf")), lse * LOG2E, float("inf"))


@triton.jit
def _add_dq(
    dq, q, dout, lse, delta, k, v, scale_log2, allowed, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one piece to dQ."""
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    weights = tl.exp2(scores * scale_log2 - lse[:, None])
    if MASKED:
        weights = tl.where(allowed, weights, 0.0)
    dweights = tl.dot(dout, v.T, input_precision=PRECISION)
    dscores = weights * (dweights - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=CHANGING, do_not_specialize_on_alignment=["lse_pointer", "delta_pointer"]
)
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
    lists,
    list_width,
    most_runs,
    ranges,
    range_stride,
    states,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    MERGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    entry, head, first_row = _choose_entry(
        lists, list_width, num_tiles, num_heavy, num_heads, SIDE, BLOCK_M
    )
    kv_head = head // GROUP
    rows = first_row + tl.arange(0, BLOCK_M)
    scale_log2 = scale * LOG2E
    q = _load_block(q_matrix, first_row, head, DIM, PADDED)
    dout = _load_block(dout_matrix, first_row, head, DIM, PADDED)
    lse = tl.load(lse_pointer + head * lse_stride + rows, mask=rows < num_rows, other=0.0)
    lse = _safe(lse, rows, num_rows)
    delta = tl.load(delta_pointer + head * delta_stride + rows, mask=rows < num_rows, other=0.0)
    dq = tl.zeros([BLOCK_M, PADDED], tl.float32)

    runs = entry + RUNS
    for run in range(tl.load(entry + 1)):
        first = tl.load(runs + run * 2) * SIDE
        end = tl.load(runs + run * 2 + 1) * SIDE
        for start in range(first, end, BLOCK_N):
            k = k_matrix.load([start, kv_head * DIM])
            v = v_matrix.load([start, kv_head * DIM])
            dq = _add_dq(dq, q, dout, lse, delta, k, v, scale_log2, True, False, PRECISION)

    partial = runs + most_runs * 2
    for piece in range(tl.load(entry + 2) * (SIDE // BLOCK_N)):
        start = _piece_start(partial, piece, SIDE, BLOCK_N)
        k = k_matrix.load([start, kv_head * DIM])
        v = v_matrix.load([start, kv_head * DIM])
        keys = start + tl.arange(0, BLOCK_N)
        allowed = _in_ranges(ranges, range_stride, rows, keys, NUM_RANGES)
        dq = _add_dq(dq, q, dout, lse, delta, k, v, scale_log2, allowed, True, PRECISION)

    _store_rows(
        dq * scale, lse, final_pointer + head * DIM, wide_pointer + head * DIM, lse_pointer, states,
        rows, num_rows, final_stride, wide_stride, DIM, PADDED, MERGES, False,
    )  # fmt: skip


@triton.jit
def _add_dkv(
    dk, dv, k, v, q, dout, lse, delta, scale_log2, allowed, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one piece to dK and dV. Scores are computed transposed, [keys, rows]: the weights are
    then the left operand of the next product as they are."""
    scores = tl.dot(k, q.T, input_precision=PRECISION)
    weights = tl.exp2(scores * scale_log2 - lse[None, :])
    if MASKED:
        weights = tl.where(allowed, weights, 0.0)
    dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision=PRECISION)
    dweights = tl.dot(v, dout.T, input_precision=PRECISION)
    dscores = weights * (dweights - delta[None, :])
    dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=CHANGING)
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
    lists,
    list_width,
    most_runs,
    ranges_vector,
    range_stride,
    states,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_RANGES: tl.constexpr,
    MERGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    entry, kv_head, first_key = _choose_entry(
        lists, list_width, num_tiles, num_heavy, num_heads, HALF, BLOCK_N
    )
    keys = first_key + tl.arange(0, BLOCK_N)
    scale_log2 = scale * LOG2E
    k = _load_block(k_matrix, first_key, kv_head, DIM, PADDED)
    v = _load_block(v_matrix, first_key, kv_head, DIM, PADDED)
    dk = tl.zeros([BLOCK_N, PADDED], tl.float32)
    dv = tl.zeros([BLOCK_N, PADDED], tl.float32)

    runs = entry + RUNS
    partial = runs + most_runs * 2
    num_runs = tl.load(entry + 1)
    num_pieces = tl.load(entry + 2) * (HALF // BLOCK_M)
    for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
        lse_start = head * lse_stride
        delta_start = head * delta_stride
        for run in range(num_runs):
            first = tl.load(runs + run * 2) * HALF
            end = tl.load(runs + run * 2 + 1) * HALF
            for start in range(first, end, BLOCK_M):
                q = q_matrix.load([start, head * DIM])
                lse = lse_vector.load([lse_start + start]) * LOG2E
                dout = dout_matrix.load([start, head * DIM])
                delta = delta_vector.load([delta_start + start])
                dk, dv = _add_dkv(
                    dk, dv, k, v, q, dout, lse, delta, scale_log2, True, False, PRECISION
                )
        for piece in range(num_pieces):
            start = _piece_start(partial, piece, HALF, BLOCK_M)
            rows = start + tl.arange(0, BLOCK_M)
            q = q_matrix.load([start, head * DIM])
            dout = dout_matrix.load([start, head * DIM])
            lse = _safe(lse_vector.load([lse_start + start]), rows, num_rows)
            delta = tl.where(rows < num_rows, delta_vector.load([delta_start + start]), 0.0)
            allowed = _in_ranges_transposed(
                ranges_vector, range_stride, start, keys, BLOCK_M, NUM_RANGES
            )
            dk, dv = _add_dkv(
                dk, dv, k, v, q, dout, lse, delta, scale_log2, allowed, True, PRECISION
            )

    _store_rows(
        dk * scale, 0.0, dk_pointer + kv_head * DIM, wide_dk_pointer + kv_head * DIM, dk_pointer,
        states, keys, num_keys, dk_stride, wide_stride, DIM, PADDED, MERGES, False,
    )  # fmt: skip
    _store_rows(
        dv, 0.0, dv_pointer + kv_head * DIM, wide_dv_pointer + kv_head * DIM, dv_pointer,
        states, keys, num_keys, dv_stride, wide_stride, DIM, PADDED, MERGES, False,
    )  # fmt: skip
