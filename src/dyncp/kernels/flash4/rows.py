"""Two small Triton kernels around flash-attn-4's: merging its partial outputs, and log-sum-exps and
row sums as its backward takes them."""

import triton
import triton.language as tl
from torch import Tensor

from dyncp.kernels.kernel import Sums
from dyncp.kernels.triton.forward import LOG2E, store_merged

ROWS = 32


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "partial_rows", "partial_lse_stride", "lse_stride"],
    do_not_specialize_on_alignment=["partial_lse", "lse_pointer"],
)
def _merge_partial(
    partial,
    partial_lse,
    final_pointer,
    wide_pointer,
    lse_pointer,
    states,
    partial_stride,
    final_stride,
    wide_stride,
    partial_lse_stride,
    lse_stride,
    first_row,
    partial_rows,
    num_rows,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED)[None, :]
    row = first_row + place
    wanted = (place < partial_rows) & (row < num_rows)
    wanted &= tl.load(states + num_rows + row, mask=wanted, other=3) != 3
    inside = wanted[:, None] & (columns < DIM)
    offsets = place.to(tl.int64)[:, None] * partial_stride + head * DIM + columns
    value = tl.load(partial + offsets, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(
        partial_lse + head * partial_lse_stride + place,
        mask=wanted,
        other=float("-inf"),
    )
    store_merged(
        value, lse, final_pointer + head * DIM, wide_pointer + head * DIM,
        lse_pointer + head * lse_stride, states, row, num_rows, final_stride,
        wide_stride, DIM, PADDED, True,
    )  # fmt: skip


def merge_partial(
    partial: Tensor, partial_lse: Tensor, first_row: int, states: Tensor, out: Sums, lse: Tensor
) -> None:
    """Merges `partial` [rows, heads, dim] with log-sum-exps [heads, rows] into the rows from
    `first_row` on, as `states` uint8[2, all rows] says."""
    rows, heads, dim = partial.shape
    wide, wide_stride = out.wide, out.final.stride(0)
    if wide is None:  # no row is WIDE: any memory of its dtype will do, it is not looked at
        wide = partial_lse
    else:
        wide_stride = wide.stride(0)
    _merge_partial[(triton.cdiv(rows, ROWS), heads)](
        partial, partial_lse, out.final, wide, lse, states,
        partial.stride(0), out.final.stride(0), wide_stride, partial_lse.stride(0),
        lse.stride(1), first_row, rows, states.shape[1],
        DIM=dim, PADDED=triton.next_power_of_2(dim), ROWS=ROWS, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "stride", "delta_stride", "padded_rows", "padded_stride"],
    do_not_specialize_on_alignment=["lse", "delta"],
)
def _scale_rows(
    lse,
    delta,
    places,
    scaled_lse,
    copied_delta,
    stride,
    delta_stride,
    num_rows,
    padded_rows,
    padded_stride,
    HAS_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = place
    if HAS_PLACES:
        row = tl.load(places + place, mask=place < padded_rows, other=-1)
    exists = (row >= 0) & (row < num_rows)
    value = tl.load(lse + head * stride + row, mask=exists, other=float("inf"))
    value = tl.where(value == float("-inf"), 0.0, value * LOG2E)
    tl.store(scaled_lse + head * padded_stride + place, value, mask=place < padded_rows)
    sums = tl.load(delta + head * delta_stride + row, mask=exists, other=0.0)
    tl.store(copied_delta + head * padded_stride + place, sums, mask=place < padded_rows)


def scale_rows(
    lse: Tensor, delta: Tensor, places: Tensor | None, scaled_lse: Tensor, copied_delta: Tensor
) -> None:
    """lse and delta [rows, heads] to [heads, padded rows], log-sum-exps in base 2: 0 for rows that
    attend nothing, +∞ for rows that do not exist. `places` gives the row of each padded row."""
    heads, padded = scaled_lse.shape
    block = 256
    _scale_rows[(triton.cdiv(padded, block), heads)](
        lse, delta, scaled_lse if places is None else places, scaled_lse, copied_delta,
        lse.stride(1), delta.stride(1), len(lse), padded, scaled_lse.stride(0),
        places is not None, block, num_warps=4,
    )  # fmt: skip
