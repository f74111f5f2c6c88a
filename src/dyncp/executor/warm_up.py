"""Warming up: runs, on a few rows, all that batches of an attention shape can make kernels compile.
No other rank takes part, and no plan is needed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int32
from dyncp.executor.call import empty_per_head
from dyncp.executor.engine import Engine
from dyncp.executor.layout import Dtypes
from dyncp.executor.streams import Arrival
from dyncp.kernels import (
    Gradients,
    Held,
    IndexArrays,
    KernelCall,
    RowStates,
    SettlingKernel,
    Sums,
)

ROWS = 256  # two kernel tiles: some kernels are compiled apart for a single one
SCALE = 1.0
MOST_RANGES = 64  # that lie apart in the first of them


@dataclass(frozen=True, eq=False)
class _Rows:
    """Inputs of one head group, all 0; k and v lie packed, or each by itself."""

    dtypes: Dtypes
    q: Tensor
    k: Tensor
    v: Tensor
    per_head: Tensor  # log-sum-exps, or row sums

    @staticmethod
    def make(
        heads: tuple[int, int], dim: int, dtypes: Dtypes, device: torch.device, *, packed: bool
    ) -> "_Rows":
        q_heads, kv_heads = heads
        q = torch.zeros(ROWS, q_heads, dim, dtype=dtypes.input, device=device)
        size = (ROWS, 2, kv_heads, dim) if packed else (2, ROWS, kv_heads, dim)
        k, v = torch.zeros(size, dtype=dtypes.input, device=device).unbind(1 if packed else 0)
        return _Rows(dtypes, q, k, v, empty_per_head(q).zero_())

    def sums(self, like: Tensor, *, wide: bool) -> Sums:
        """Sums that lie like `like`, with or without a wide tensor, and with room for partials."""
        final = torch.empty_strided(
            like.shape, like.stride(), dtype=like.dtype, device=like.device
        ).zero_()
        if self.dtypes.wide == self.dtypes.input:
            widened: Tensor | None = final
        else:
            zeros = torch.zeros(like.shape, dtype=self.dtypes.wide, device=like.device)
            widened = zeros if wide else None
        return Sums(final, widened, (torch.zeros_like(self.q), empty_per_head(self.q).zero_()))

    def gradients(self, *, wide: bool) -> Gradients:
        return Gradients(*(self.sums(x, wide=wide) for x in (self.q, self.k, self.v)))


def warm_up(
    engine: Engine, heads: tuple[int, int], dim: int, dtypes: Dtypes, most_ranges: int
) -> None:
    """For a head group of so many q heads and kv heads, and calls of up to `most_ranges`."""
    if not 1 <= most_ranges <= MOST_RANGES:
        raise ValueError(f"most_ranges is {most_ranges}; from 1 to {MOST_RANGES} are allowed")
    for packed in (True, False):
        rows = _Rows.make(heads, dim, dtypes, engine.device, packed=packed)
        for call, wide in _list_calls(most_ranges):
            _attend(engine, call, rows, wide=wide)
        _move(engine, rows)
    if engine.on_gpu:
        torch.cuda.synchronize(engine.device)


def _list_calls(most_ranges: int) -> Iterator[tuple[KernelCall, bool]]:
    """One causal sequence, two, and masks of 1, 2, 4, ... ranges: each as the only contribution to
    its rows, and as the first of several, with wide sums."""
    row = np.arange(ROWS, dtype=np.int32)
    whole = np.stack([0 * row, row + 1], axis=1)[:, None]
    halves = np.stack([row // (ROWS // 2) * (ROWS // 2), row + 1], axis=1)[:, None]
    counts = [1 << power for power in range((most_ranges - 1).bit_length() + 1)]
    for ranges in (whole, halves, *(_stripes(count) for count in counts)):
        yield _call(ranges, Held.FINAL), False
        yield _call(ranges, Held.WIDE), True


def _stripes(num_ranges: int) -> Int32:
    """Ranges that lie apart in partial tiles, so that none can be left out."""
    step = ROWS // 2 // num_ranges
    start = np.arange(num_ranges) * step
    ranges = np.stack([start, start + step // 2], axis=1).astype(np.int32)
    return np.tile(ranges, (ROWS, 1, 1))


def _call(ranges: Int32, after: Held) -> KernelCall:
    """All rows attend all keys that their ranges allow."""
    coordinates, rectangles = np.arange(ROWS), np.asarray([[0, ROWS, 0, ROWS]])
    states = RowStates(np.full(ROWS, Held.NOTHING, np.uint8), np.full(ROWS, after, np.uint8))
    alone = after is Held.FINAL
    return KernelCall(
        0, rectangles, coordinates, coordinates, ranges, states, states, alone, in_place=alone
    )


def _attend(engine: Engine, call: KernelCall, rows: _Rows, *, wide: bool) -> None:
    """Forward and backward."""
    kernel, arrays = engine.kernel, IndexArrays(engine.device)
    forward = kernel.lower(call, arrays, backward=False)
    backward = kernel.lower(call, arrays, backward=True)
    Arrival(arrays).wait()
    q, k, v, per_head = rows.q, rows.k, rows.v, rows.per_head
    kernel.attend(forward, q, k, v, SCALE, rows.sums(q, wide=wide), empty_per_head(q))
    grads = rows.gradients(wide=wide)
    if not kernel.settles:
        kernel.attend_backward(backward, (q, k, v), q, per_head, per_head, SCALE, grads)
        return
    settling, whole = cast(SettlingKernel, kernel), slice(0, ROWS)
    own = settling.open_gradients([backward], q, k, _take_fp32(engine.device))
    grads = Gradients(grads.dq, grads.dk, grads.dv, own)
    kernel.attend_backward(backward, (q, k, v), q, per_head, per_head, SCALE, grads)
    settling.settle_queries(own, whole, SCALE, grads.dq.final)
    settling.settle_keys(own, whole, SCALE, grads.dk.final, grads.dv.final)


def _take_fp32(device: torch.device) -> Callable[[int], Tensor]:
    return lambda items: torch.zeros(items, device=device)


def _move(engine: Engine, rows: _Rows) -> None:
    """Every row operation, on every kind of rows that travels."""
    row_ops, arrays, dtypes = engine.row_ops, IndexArrays(engine.device), rows.dtypes
    segments = np.asarray([[0, 0, ROWS, Held.NOTHING, Held.FINAL, 0, 0]], np.int64)
    table = row_ops.tables(segments, np.asarray([0, 1]), arrays)[0]
    Arrival(arrays).wait()
    q, k, per_head = rows.q, rows.k, rows.per_head
    row_ops.row_sums(q, q, per_head)
    message_lse = _message(per_head, dtypes.wide)
    for given, message in ((per_head, message_lse), *((x, _message(x, x.dtype)) for x in (q, k))):
        row_ops.pack(table, [given], message)
        row_ops.unpack(table, message, [given])
    sends_wide = dtypes.partial != dtypes.input
    for given in (q, k):
        sums, message = rows.sums(given, wide=True), _message(given, dtypes.partial)
        sent = sums.wide if sends_wide and sums.wide is not None else sums.final
        row_ops.pack(table, [sent], message)
        row_ops.add(table, message, [sums])
        if given is q:
            row_ops.merge(table, message, message_lse, sums, per_head)


def _message(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(rows.numel(), dtype=dtype, device=rows.device)
