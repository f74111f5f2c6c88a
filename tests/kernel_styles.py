"""Kernels that behave like those on GPUs: one rounds its partial outputs, one settles gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.kernels import (
    Gradients,
    Held,
    IndexArrays,
    KernelCall,
    ReferenceKernel,
    RowStates,
    Sums,
    TorchRowOps,
)
from dyncp.kernels.accumulate import list_runs
from dyncp.plan.rooms import padded_rows


class RoundingKernel(ReferenceKernel):
    """Rounds every call's output to q's dtype and then merges it."""

    def __init__(self) -> None:
        super().__init__(8, 8, name="rounding", rounds_partials=True)

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        if backward:
            return super().lower(call, arrays, backward=True)
        rows = len(call.q_coordinates)
        touched = call.q_states.after != Held.UNTOUCHED
        alone = RowStates(
            np.zeros(rows, np.uint8),
            np.where(touched, Held.FINAL, Held.UNTOUCHED).astype(np.uint8),
        )
        fresh = KernelCall(
            call.head_group,
            call.rectangles,
            call.q_coordinates,
            call.k_coordinates,
            call.ranges,
            alone,
            call.k_states,
        )
        return super().lower(fresh, arrays, backward=False), call.q_states

    def attend(self, lowered, q, k, v, scale, out: Sums, lse: Tensor) -> None:
        call, states = lowered
        touched = states.after != Held.UNTOUCHED
        if (states.before[touched] == Held.NOTHING).all():
            assert (states.after[touched] == Held.FINAL).all() or out.wide is not None
            if (states.after[touched] == Held.FINAL).all():
                super().attend(call, q, k, v, scale, Sums(out.final, None), lse)
                return
        assert out.partial is not None, "merging needs room for the partial output"
        partial, partial_lse = out.partial
        super().attend(call, q, k, v, scale, Sums(partial, None), partial_lse)
        heads, dim = q.shape[1:]
        table = [
            (row := run.rows.start, row * heads * dim, run.rows.stop - row, run.before, run.after,
             row * heads, 0)
            for run in list_runs(states)
        ]  # fmt: skip
        TorchRowOps().merge(table, partial.reshape(-1), partial_lse.reshape(-1), out, lse)


class SettlingReference(ReferenceKernel):
    """Collects gradients in fp32 until it is asked to settle."""

    def __init__(self) -> None:
        super().__init__(8, 8, name="settling", settles=True)

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        if backward:
            for states in (call.q_states, call.k_states):
                assert (states.after == Held.UNTOUCHED).all()
        return super().lower(call, arrays, backward=backward)

    def open_gradients(
        self, calls: list[Any], q: Tensor, k: Tensor, take: Callable[[int], Tensor]
    ) -> Any:
        """Takes the room that a kernel like flash4 takes, and uses some of it."""
        for _ in range(2):
            take(q.shape[1] * padded_rows(len(q)))
        if q.shape[1] == k.shape[1]:
            for _ in range(2):
                take(-(-k.numel() * k.element_size() // 4))
        return [take(x.numel()).view(x.shape).zero_() for x in (q, k, k)]

    def attend_backward(self, lowered, inputs, dout, lse, delta, scale, grads: Gradients) -> None:
        own = [torch.zeros_like(x) for x in grads.own]
        super()._attend_backward(lowered.tiles, inputs, dout, lse, delta, scale, tuple(own))
        for collected, new in zip(grads.own, own, strict=True):
            collected.add_(new)

    def settle_queries(self, own: Any, rows: slice, scale: float, dq: Tensor) -> None:
        dq.copy_(own[0][rows])

    def settle_keys(self, own: Any, rows: slice, scale: float, dk: Tensor, dv: Tensor) -> None:
        dk.copy_(own[1][rows])
        dv.copy_(own[2][rows])

    def clear_queries(self, own: Any, rows: slice) -> None:
        own[0][rows] = 0

    def clear_keys(self, own: Any, rows: slice) -> None:
        own[1][rows] = 0
        own[2][rows] = 0
