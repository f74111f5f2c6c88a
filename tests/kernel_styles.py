"""Kernels that behave like those on GPUs: one leaves the output of every call apart, one collects
gradients."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.kernels import (
    Gradients,
    IndexArrays,
    KernelCall,
    ReferenceKernel,
    RowState,
    RowStates,
    Sums,
)
from dyncp.kernels.row_ops import PANEL_COLUMNS, PANEL_ROWS

SIDE = 64  # rows that collected sums are padded to
LOG2E = 1.4426950408889634


class RoundingKernel(ReferenceKernel):
    """Rounds every call's output to q's dtype."""

    name = "rounding"
    merges = False

    def __init__(self) -> None:
        super().__init__(8)

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        if backward:
            return super().lower(call, arrays, backward=True)
        rows = len(call.q_coordinates)
        fresh = RowStates(np.zeros(rows, np.uint8), np.full(rows, RowState.FINAL, np.uint8))
        alone = KernelCall(
            call.head_group,
            call.rectangles,
            call.q_coordinates,
            call.k_coordinates,
            call.ranges,
            fresh,
            call.k_states,
            call.q_rows,
            call.k_rows,
        )
        return super().lower(alone, arrays, backward=False), call.q_rows

    def attend(self, lowered, q, k, v, scale, out: Sums, lse: Tensor) -> None:
        call, rows = lowered
        assert out.wide is None or out.wide is out.final
        all_out, all_lse = torch.zeros_like(q), lse.new_zeros(q.shape[:2])
        super().attend(call, q, k, v, scale, Sums(all_out), all_lse)
        out.final.copy_(all_out[rows])
        lse.copy_(all_lse[rows])


class CollectingReference(ReferenceKernel):
    """Collects gradients in panels; where heads are not grouped, it writes dK and dV of every call,
    as flash-attn-4 does."""

    name = "collecting"
    collects = True
    row_multiple, dim_multiple = SIDE, 16

    def __init__(self) -> None:
        super().__init__(8)

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        lowered = super().lower(call, arrays, backward=backward)
        return (lowered, call.k_rows) if backward else lowered

    def attend_backward(self, lowered, inputs, scale, grads: Gradients) -> None:
        """Log-sum-exps come in base 2, and sums are scaled later."""
        (call, rows), num_rows = lowered, len(inputs.q)
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in inputs[:3])
        lse, delta = inputs.lse[:num_rows] / LOG2E, inputs.delta[:num_rows]
        given = inputs._replace(lse=lse, delta=delta)
        self.add_gradients(call, given, scale, (dq, dk, dv))
        _add(grads.dq.final, dq / scale)
        if grads.dk.final.ndim == 3:
            grads.dk.final.copy_(dk[rows])
            grads.dv.final.copy_(dv[rows])
        else:
            _add(grads.dk.final, dk / scale)
            _add(grads.dv.final, dv)


def _add(panels: Tensor, rows: Tensor) -> None:
    num_rows, heads, dim = rows.shape
    width = -(-dim // 16) * 16
    padded = rows.new_zeros(heads, panels.shape[1] // width, width)
    padded[:, :num_rows, :dim] = rows.transpose(0, 1)
    panels += rows_to_panels(padded).view(heads, -1)


def rows_to_panels(rows: Tensor) -> Tensor:
    """What `panels_to_rows` reads, of [heads, rows, dim]."""
    heads, num_rows, dim = rows.shape
    split = rows.reshape(heads, num_rows // PANEL_ROWS, 4, 2, 8, dim // PANEL_COLUMNS, 4, 2)
    return split.permute(0, 1, 5, 2, 4, 6, 3, 7).reshape(heads, num_rows, dim)
