"""Workspace: the tensors of one head group on one rank during one call, own rows first."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dyncp.executor.layout import Views
from dyncp.executor.lowering import LoweredProgram
from dyncp.executor.messages import space_of
from dyncp.kernels import Gradients, Sums
from dyncp.plan import Direction, Space
from dyncp.plan.rooms import INPUTS, OUTPUTS


@dataclass(frozen=True, eq=False)
class Workspace:
    """`inputs` are q, k, v, in backward also dout and delta, and lse, which forward writes. `sums`
    are out, or dq, dk, dv; `partial` is room for results before they are merged."""

    inputs: dict[str, Tensor]
    sums: dict[str, Sums]
    partial: dict[str, Tensor] = field(default_factory=dict)
    own: Any = None  # accumulators of a settling kernel

    def gradients(self) -> Gradients:
        return Gradients(self.sums["dq"], self.sums["dk"], self.sums["dv"], self.own)


class Opener:
    """Makes the workspaces of one rank from the caller's tensors and the rooms of the call."""

    def __init__(self, lowered: LoweredProgram, views: Views) -> None:
        self._lowered, self._rooms = lowered, views.rooms

    def open(self, group: int, given: dict[str, Tensor], results: dict[str, Tensor]) -> Workspace:
        """`given` are read, `results` written: the rank's own rows, this head group's heads."""
        direction = self._lowered.direction
        inputs = {
            name: self._input(name, group, given[name])
            for space in Space
            for name in INPUTS[direction][space]
        }
        if direction is Direction.FORWARD:
            inputs["lse"] = self._rooms.get(("lse", group), results["lse"])
        else:
            inputs["lse"] = self._input("lse", group, given["lse"])
            inputs["delta"] = self._rooms["delta", group]
            self._clear_tail(inputs["delta"])
        names = [name for space in Space for name in OUTPUTS[direction][space]]
        sums = {name: self._sums(name, group, results[name]) for name in names}
        partial = {
            name: self._rooms[f"{name}_partial", group]
            for name in (*names, "lse")
            if (f"{name}_partial", group) in self._rooms
        }
        if direction is Direction.FORWARD and "out" in partial:
            out = sums["out"]
            sums["out"] = Sums(out.final, out.wide, (partial["out"], partial["lse"]))
        self._clear_empty_rows(group, inputs, sums)
        return Workspace(inputs, sums, partial)

    def close(self, group: int, workspace: Workspace, results: dict[str, Tensor]) -> None:
        """Copies own rows of results that lie in a room to where the caller gets them."""
        for name, result in results.items():
            if (name, group) in self._rooms:
                inside = workspace.inputs[name] if name == "lse" else workspace.sums[name].final
                result.copy_(inside[: len(result)])

    def _input(self, name: str, group: int, own: Tensor) -> Tensor:
        if (name, group) not in self._rooms:
            return own
        rows = self._rooms[name, group]
        rows[: len(own)].copy_(own)
        self._clear_tail(rows)
        return rows

    def _clear_tail(self, rows: Tensor) -> None:
        """Rows between slots are read as part of kernel tiles: they count nothing, but 0 × NaN
        would be NaN."""
        if len(rows) > self._lowered.local_rows:
            rows[self._lowered.local_rows :].zero_()

    def _sums(self, name: str, group: int, result: Tensor) -> Sums:
        final = self._rooms.get((name, group), result)
        if final.dtype in (torch.float32, torch.float64):
            return Sums(final, final)
        return Sums(final, self._rooms.get((f"{name}_wide", group)))

    def _clear_empty_rows(
        self, group: int, inputs: dict[str, Tensor], sums: dict[str, Sums]
    ) -> None:
        """Rows that nothing is added to give 0, and log-sum-exp −∞."""
        for name, summed in sums.items():
            for rows in self._lowered.empty_rows.get((space_of(name), group), ()):
                summed.final[rows].zero_()
                if name == "out":
                    inputs["lse"][rows].fill_(-torch.inf)
