"""Forward: one program per query tile and head, over runs of full key tiles and partial ones."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SIDE = tl.constexpr(128)
HALF = tl.constexpr(64)


@triton.jit
def choose_tile(order, num_tiles, num_heavy, num_heads, PARTS: tl.constexpr):
    """Tile, head and part of the tile of this program: heavy tiles first, for all heads; then the
    others head by head, whose keys stay in the cache."""
    program = tl.program_id(0)
    part = program % PARTS
    program = program // PARTS
    if program < num_heavy * num_heads:
        place = program // num_heads
        head = program % num_heads
    else:
        program -= num_heavy * num_heads
        place = num_heavy + program % (num_tiles - num_heavy)
        head = program // (num_tiles - num_heavy)
    return tl.load(order + place), head, part


@triton.jit
def load_block(matrix, first_row, head, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of one head of a [rows, heads × DIM] descriptor, 0 outside."""
    block = matrix.load([first_row, head * DIM])
    if PADDED != DIM:  # the next head's columns
        block = tl.where(tl.arange(0, PADDED)[None, :] < DIM, block, 0.0)
    return block


@triton.jit
def between(keys, start, end, KEYS_FIRST: tl.constexpr):
    if KEYS_FIRST:
        allowed = (keys[:, None] >= start[None, :]) & (keys[:, None] < end[None, :])
    else:
        allowed = (keys[None, :] >= start[:, None]) & (keys[None, :] < end[:, None])
    return allowed


@triton.jit
def in_ranges(ranges, range_stride, rows, keys, NUM_RANGES: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """bool[rows, keys], or [keys, rows]: the key row lies in one of the query row's ranges."""
    allowed = between(
        keys, tl.load(ranges + rows), tl.load(ranges + range_stride + rows), KEYS_FIRST
    )
    for r in tl.static_range(1, NUM_RANGES):
        start = tl.load(ranges + 2 * r * range_stride + rows)
        end = tl.load(ranges + (2 * r + 1) * range_stride + rows)
        allowed |= between(keys, start, end, KEYS_FIRST)
    return allowed


@triton.jit
def _online_softmax(
    scores, accumulator, row_sum, row_max, v, scale_log2, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one piece of scores into the running softmax; maxima are of scaled scores, base 2."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    shift = new_max
    if MASKED:  # a row may have attended nothing so far
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    accumulator = accumulator * decay[:, None]
    accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
    return accumulator, row_sum, new_max


@triton.jit
def store_merged(
    value, lse, final_pointer, wide_pointer, lse_pointer, states, rows, num_rows, final_stride,
    wide_stride, DIM: tl.constexpr, PADDED: tl.constexpr, MERGES: tl.constexpr,
):  # fmt: skip
    """Merges rows of one head into what they hold, as their states say: `before`, then `after`."""
    columns = tl.arange(0, PADDED)[None, :]
    is_column = columns < DIM
    final_at = final_pointer + rows.to(tl.int64)[:, None] * final_stride + columns
    wide_at = wide_pointer + rows.to(tl.int64)[:, None] * wide_stride + columns
    after = tl.load(states + num_rows + rows, mask=rows < num_rows, other=3)
    if MERGES:
        before = tl.load(states + rows, mask=rows < num_rows, other=0)
        held = tl.load(final_at, mask=(before == 1)[:, None] & is_column, other=0.0).to(tl.float32)
        held += tl.load(wide_at, mask=(before == 2)[:, None] & is_column, other=0.0)
        held_lse = tl.load(lse_pointer + rows, mask=before != 0, other=float("-inf"))
        largest = tl.maximum(held_lse, lse)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        held_share = tl.exp2((held_lse - shift) * LOG2E)
        share = tl.exp2((lse - shift) * LOG2E)
        total = held_share + share
        scaled = 1.0 / tl.where(total > 0, total, 1.0)
        value = value * (share * scaled)[:, None] + held * (held_share * scaled)[:, None]
        lse = tl.where(total > 0, shift + tl.log2(total) * LN2, float("-inf"))
        tl.store(wide_at, value, mask=(after == 2)[:, None] & is_column)
        tl.debug_barrier()  # every warp has read the row's log-sum-exp before one replaces it
    tl.store(
        final_at,
        value.to(final_pointer.dtype.element_ty),
        mask=(after == 1)[:, None] & is_column,
    )
    tl.store(lse_pointer + rows, lse, mask=after != 3)


@triton.jit(
    do_not_specialize=[
        "num_rows", "lse_stride", "range_stride", "most_runs", "most_partial", "num_tiles",
        "num_heavy", "num_heads",
    ],
    do_not_specialize_on_alignment=["lse_pointer"],
)  # fmt: skip
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
    q = load_block(q_matrix, first_row, head, DIM, PADDED)
    accumulator = tl.zeros([BLOCK_M, PADDED], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)

    for run in range(tl.load(run_count + tile)):
        first = tl.load(runs + (tile * most_runs + run) * 2) * SIDE
        end = tl.load(runs + (tile * most_runs + run) * 2 + 1) * SIDE
        for start in range(first, end, BLOCK_N):
            k = k_matrix.load([start, kv_head * DIM])
            scores = tl.dot(q, k.T, input_precision=PRECISION)
            v = v_matrix.load([start, kv_head * DIM])
            accumulator, row_sum, row_max = _online_softmax(
                scores, accumulator, row_sum, row_max, v, scale_log2, False, PRECISION
            )

    pieces: tl.constexpr = SIDE // BLOCK_N
    for piece in range(tl.load(partial_count + tile) * pieces):
        listed = piece // pieces
        k_tile = tl.load(partial + tile * most_partial + listed)
        start = k_tile * SIDE + (piece - listed * pieces) * BLOCK_N
        k = k_matrix.load([start, kv_head * DIM])
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        keys = start + tl.arange(0, BLOCK_N)
        allowed = in_ranges(ranges, range_stride, rows, keys, NUM_RANGES, False)
        scores = tl.where(allowed, scores, float("-inf"))
        v = v_matrix.load([start, kv_head * DIM])
        accumulator, row_sum, row_max = _online_softmax(
            scores, accumulator, row_sum, row_max, v, scale_log2, True, PRECISION
        )

    attended = row_sum > 0
    accumulator = accumulator / tl.where(attended, row_sum, 1.0)[:, None]
    lse = tl.where(attended, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
    store_merged(
        accumulator, lse, final_pointer + head * DIM, wide_pointer + head * DIM,
        lse_pointer + head * lse_stride, states, rows, num_rows, final_stride, wide_stride,
        DIM, PADDED, MERGES,
    )  # fmt: skip
