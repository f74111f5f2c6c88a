"""Kernel `flash4`: flash-attn-4 over lists of kernel tiles with ranges of key rows, or its own
causal and varlen paths where a call is just that."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dyncp.kernels.call import KernelCall
from dyncp.kernels.flash4 import compiled as flash
from dyncp.kernels.flash4.lowering import Lowered, lower_call, padded, varlen_rows
from dyncp.kernels.flash4.rows import merge_partial, scale_rows
from dyncp.kernels.index_arrays import IndexArrays
from dyncp.kernels.kernel import Gradients, Sums
from dyncp.kernels.tile_lists import SIDE
from dyncp.kernels.triton.kernel import TritonKernel

DTYPES = (torch.bfloat16, torch.float16)
DIM_MULTIPLE = 32  # of the head dim of its gradient sums
MOST_DIM = 128  # above, its kernel tiles are not 128 × 128


@dataclass(frozen=True, eq=False)
class Collected:
    """Gradient sums of all calls of a program, and room for log-sum-exps and row sums."""

    q: Tensor
    k: Tensor
    shape: flash.Shape
    sums: flash.Accumulators
    scaled_lse: Tensor  # [heads, padded rows]
    delta: Tensor
    written: tuple[Tensor, Tensor] | None  # dk, dv of one call, where heads are not grouped


class Flash4Kernel:
    """`deterministic` takes the backward of kernel `triton`; otherwise gradients are added up by
    atomics, in any order."""

    name = "flash4"
    rounds_partials = True
    row_multiple = SIDE
    dim_multiple = DIM_MULTIPLE

    def __init__(self, *, deterministic: bool) -> None:
        self.settles = not deterministic
        self._triton = TritonKernel()

    def refuses(self, dtype: torch.dtype, dim: int) -> str:
        """Why this kernel does not take such inputs; empty if it does."""
        return _why_not(dtype, dim)

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        if backward and not self.settles:
            return self._triton.lower(call, arrays, backward=True)
        return lower_call(call, arrays, backward=backward)

    def attend(
        self,
        lowered: Lowered,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out: Sums,
        lse: Tensor,
    ) -> None:
        rows, keys = lowered.rows, lowered.keys
        inputs = (_part(q, rows), _part(k, keys), _part(v, keys), scale, lowered.shape())
        if lowered.direct:
            flash.attend(*inputs, _part(out.final, rows), _part(lse, rows).T)
            return
        assert out.partial is not None, "a call that is merged has no room for its partial output"
        first = slice(0, rows.stop - rows.start)
        partial, partial_lse = (_part(x, first) for x in out.partial)
        flash.attend(*inputs, partial, partial_lse.T)
        merge_partial(partial, partial_lse.T, rows.start, lowered.states.tensor, out, lse)

    def attend_backward(
        self,
        lowered: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: Gradients,
    ) -> None:
        if not self.settles:
            self._triton.attend_backward(lowered, inputs, dout, lse, delta, scale, grads)
            return
        own: Collected = grads.own
        rows, keys, (q, k, v) = lowered.rows, lowered.keys, inputs
        places = None if lowered.places is None else lowered.places.tensor
        room = padded(rows) if places is None else slice(None)
        scaled_lse, copied_delta = own.scaled_lse[:, room], own.delta[:, room]
        scale_rows(_part(lse, rows), _part(delta, rows), places, scaled_lse, copied_delta)
        sums, cut = own.sums, (_part(q, rows), _part(k, keys), _part(v, keys))
        dim = _dim(q)
        spans = [(sums.dq, rows)]
        if own.written is None:
            spans += [(sums.dk, keys), (sums.dv, keys)]
        parts = [
            x if places is not None else x[:, span.start * dim : padded(span).stop * dim]
            for x, span in spans
        ]
        if own.written is not None:
            parts += [x[keys] for x in own.written]
        flash.attend_backward(
            cut,
            _part(dout, rows),
            scaled_lse,
            copied_delta,
            scale,
            lowered.shape(),
            flash.Accumulators(*parts),
        )
        if own.written is not None:
            sums.dk[keys].add_(own.written[0][keys])
            sums.dv[keys].add_(own.written[1][keys])

    def open_gradients(
        self, calls: list[Lowered], q: Tensor, k: Tensor, take: Callable[[int], Tensor]
    ) -> Collected:
        heads, kv_heads, dim = q.shape[1], k.shape[1], _dim(q)
        q_rows, k_rows = _collected_rows(calls, len(q), len(k))
        shape = calls[0].shape() if calls else None
        dq = take(heads * q_rows * dim).view(heads, q_rows * dim)
        if heads == kv_heads:
            dk, dv = (take(k_rows * k[0].numel()).view(k_rows, *k.shape[1:]) for _ in range(2))
            written: tuple[Tensor, Tensor] | None
            written = (_room_like(k, k_rows, take), _room_like(k, k_rows, take))
        else:
            dk, dv = (take(kv_heads * k_rows * dim).view(kv_heads, k_rows * dim) for _ in range(2))
            written = None
        for sums in (dq, dk, dv):
            sums.zero_()
        scaled_lse, delta = (take(heads * q_rows).view(heads, q_rows) for _ in range(2))
        room = flash.Accumulators(dq, dk, dv)
        return Collected(q, k, shape, room, scaled_lse, delta, written)

    def settle_queries(self, own: Collected, rows: slice, scale: float, dq: Tensor) -> None:
        dim = _dim(own.q)
        varlen = isinstance(own.shape, flash.Varlen)
        part = own.sums.dq if varlen else own.sums.dq[:, rows.start * dim : padded(rows).stop * dim]
        flash.settle_queries(own.q, own.k, own.shape, part, scale, dq)

    def settle_keys(
        self, own: Collected, rows: slice, scale: float, dk: Tensor, dv: Tensor
    ) -> None:
        if own.written is not None:
            dk.copy_(own.sums.dk[rows])
            dv.copy_(own.sums.dv[rows])
            return
        dim = _dim(own.q)
        varlen = isinstance(own.shape, flash.Varlen)
        for sums, grad, factor in ((own.sums.dk, dk, scale), (own.sums.dv, dv, 1.0)):
            part = sums if varlen else sums[:, rows.start * dim : padded(rows).stop * dim]
            flash.settle_keys(own.q, own.k, own.shape, part, factor, grad)

    def clear_queries(self, own: Collected, rows: slice) -> None:
        dim = _dim(own.q)
        own.sums.dq[:, rows.start * dim : padded(rows).stop * dim].zero_()

    def clear_keys(self, own: Collected, rows: slice) -> None:
        dim = _dim(own.q)
        for sums in (own.sums.dk, own.sums.dv):
            if own.written is not None:
                sums[rows].zero_()
            else:
                sums[:, rows.start * dim : padded(rows).stop * dim].zero_()


def _room_like(k: Tensor, num_rows: int, take: Callable[[int], Tensor]) -> Tensor:
    """[num_rows, heads, dim] of k's dtype, which has two bytes."""
    items = num_rows * k.shape[1] * k.shape[2]
    return take(-(-items // 2)).view(k.dtype)[:items].view(num_rows, *k.shape[1:])


def _part(x: Tensor, rows: slice) -> Tensor:
    """x[rows], which costs host time where it is all of x."""
    return x if x.shape[0] == rows.stop - rows.start else x[rows]


def _collected_rows(calls: list[Lowered], q_rows: int, k_rows: int) -> tuple[int, int]:
    if len(calls) == 1 and calls[0].places is not None:
        count = len(calls[0].indices[0]) - 1
        return len(calls[0].places), varlen_rows(k_rows, count, SIDE)
    return padded(slice(0, q_rows)).stop, padded(slice(0, k_rows)).stop


def _dim(q: Tensor) -> int:
    """Head dim of its sums, which are padded."""
    return -(-q.shape[2] // DIM_MULTIPLE) * DIM_MULTIPLE


@cache
def _why_not(dtype: torch.dtype, dim: int) -> str:
    if dtype in DTYPES and dim <= MOST_DIM and dim % 8 == 0:
        return ""
    return (
        f"kernel 'flash4' takes {', '.join(map(str, DTYPES))} and head dims up to {MOST_DIM} in "
        f"steps of 8; q is {dtype} with head dim {dim}. Kernel 'triton' takes more; kernel='auto' "
        "finds the one that fits"
    )
