"""RowOps: moves rows between workspaces and messages, and merges received results.

Rows are [rows, heads, dim] tensors, or [rows, heads] ones with any strides. A message is flat and
holds segments: the rows of one block, one after the other. A table lists the segments of one
launch, those of one or of two tensors of the same shape. Results for the same rows are added in the
order of the table; otherwise no two segments write the same row.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from dyncp.arrays import Int64
from dyncp.kernels.accumulate import accumulator_dtype
from dyncp.kernels.call import Held
from dyncp.kernels.index_arrays import IndexArrays
from dyncp.kernels.kernel import Sums
from dyncp.kernels.merge import merge_partial

# Columns of a table of segments. `offset` and `lse_offset` count items of the message's dtype;
# `before` and `after` are `Held` of the rows a result is merged into; `which` is 0, or 1 for the
# second of two tensors.
ROW, OFFSET, COUNT, BEFORE, AFTER, LSE_OFFSET, WHICH = range(7)


class RowOps(Protocol):
    """One launch each, for all segments of a table."""

    def tables(self, segments: Int64, bounds: Int64, arrays: IndexArrays) -> list[Any]:
        """Tables of the segments int64[segments, 7] between consecutive bounds."""

    def pack(self, table: Any, rows: Sequence[Tensor], message: Tensor) -> None:
        """Copies rows into a message, in the message's dtype."""

    def unpack(self, table: Any, message: Tensor, rows: Sequence[Tensor]) -> None:
        """Copies a message into rows."""

    def merge(
        self, table: Any, message: Tensor, message_lse: Tensor, out: Sums, lse: Tensor
    ) -> None:
        """Merges partial outputs with log-sum-exps into rows, as the table's states say."""

    def add(self, table: Any, message: Tensor, sums: Sequence[Sums]) -> None:
        """Adds partial gradients to rows, as the table's states say."""

    def row_sums(self, dout: Tensor, out: Tensor, delta: Tensor) -> None:
        """delta [rows, heads] = Σ dO·O over the head's dimension, in delta's dtype."""


class TorchRowOps:
    """Plain torch, segment by segment."""

    def tables(self, segments: Int64, bounds: Int64, arrays: IndexArrays) -> list[Any]:  # noqa: ARG002
        lists, ends = segments.tolist(), bounds.tolist()
        return [lists[first:end] for first, end in pairwise(ends)]

    def pack(self, table: Any, rows: Sequence[Tensor], message: Tensor) -> None:
        for segment in table:
            own = rows[segment[WHICH]][segment[ROW] : segment[ROW] + segment[COUNT]]
            _segment(message, segment[OFFSET], own).copy_(own)

    def unpack(self, table: Any, message: Tensor, rows: Sequence[Tensor]) -> None:
        for segment in table:
            own = rows[segment[WHICH]][segment[ROW] : segment[ROW] + segment[COUNT]]
            own.copy_(_segment(message, segment[OFFSET], own))

    def merge(
        self, table: Any, message: Tensor, message_lse: Tensor, out: Sums, lse: Tensor
    ) -> None:
        for row, offset, count, before, after, lse_offset, _ in table:
            rows = slice(row, row + count)
            new = _segment(message, offset, out.final[rows])
            new_lse = _segment(message_lse, lse_offset, lse[rows])
            _merge_rows(new, new_lse, out, lse, rows, before, after)

    def add(self, table: Any, message: Tensor, sums: Sequence[Sums]) -> None:
        dtype = accumulator_dtype(sums[0].final.dtype)
        for row, offset, count, before, after, _, which in table:
            rows, own = slice(row, row + count), sums[which]
            new = _segment(message, offset, own.final[rows]).to(dtype)
            if before != Held.NOTHING:
                new = _target(own, before)[rows].to(dtype) + new
            _target(own, after)[rows] = new.to(_target(own, after).dtype)

    def row_sums(self, dout: Tensor, out: Tensor, delta: Tensor) -> None:
        torch.sum(dout.to(delta.dtype) * out, dim=-1, out=delta)


def _merge_rows(
    new: Tensor, new_lse: Tensor, out: Sums, lse: Tensor, rows: slice, before: int, after: int
) -> None:
    target = _target(out, after)
    if before == Held.NOTHING:
        target[rows], lse[rows] = new.to(target.dtype), new_lse
        return
    old = _target(out, before)[rows].to(lse.dtype)
    merge_partial(old, lse[rows], new.to(lse.dtype), new_lse)
    target[rows] = old.to(target.dtype)


def _segment(message: Tensor, offset: int, like: Tensor) -> Tensor:
    return message[offset : offset + like.numel()].view(like.shape)


def _target(sums: Sums, held: int) -> Tensor:
    if held == Held.FINAL:
        return sums.final
    assert sums.wide is not None, "a row is wide, but its sum has no such tensor"
    return sums.wide


def choose_row_ops(device: torch.device) -> RowOps:
    """Triton on GPUs, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchRowOps()
    from dyncp.kernels.triton.rows import TritonRowOps

    return TritonRowOps()
