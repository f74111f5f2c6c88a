"""Workspace: the rows of one head group on one rank during one call, own rows first."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.kernels import merge_partial
from dyncp.plan import INPUT_SPACE, Payload, Space

ACCUMULATORS = {Space.Q: ("out", "dq"), Space.KV: ("dk", "dv")}


@dataclass(frozen=True, eq=False)
class Workspace:
    """Named tensors of equal row numbers per space: q, dout, lse, delta, out, dq are query rows;
    k, v, dk, dv are key rows."""

    tensors: dict[str, Tensor]
    partial_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.tensors["q"].device

    def accept(self, kind: Payload, rows: slice, fields: Mapping[str, Tensor]) -> None:
        """Takes a received payload: an input fills its slot, a result is merged."""
        if kind in INPUT_SPACE:
            for name, value in fields.items():
                self.tensors[name][rows] = value
            self._reset_accumulators(INPUT_SPACE[kind], kind, rows)
        elif kind is Payload.OUT:
            out, lse = self.tensors["out"][rows], self.tensors["lse"][rows]
            merge_partial(out, lse, fields["out"].to(out.dtype), fields["lse"])
        else:
            for name, value in fields.items():
                self.tensors[name][rows] += value

    def _reset_accumulators(self, space: Space, kind: Payload, rows: slice) -> None:
        """A slot may have held another block before."""
        for name in ACCUMULATORS[space]:
            if name in self.tensors:
                self.tensors[name][rows] = 0
        if kind is Payload.Q:
            self.tensors["lse"][rows] = -torch.inf


def with_slots(own: Tensor, num_rows: int) -> Tensor:
    """`own` rows followed by room for slots; the tensor itself where there are no slots."""
    if num_rows == len(own):
        return own
    rows = own.new_zeros(num_rows, *own.shape[1:])
    rows[: len(own)] = own
    return rows


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
