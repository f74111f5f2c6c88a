"""Workspace: the tensors of one head group on one rank during one call, own rows first."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dyncp.executor.layout import Views
from dyncp.executor.lowering import LoweredProgram
from dyncp.executor.messages import space_of
from dyncp.kernels import Gradients, Sums
from dyncp.plan import Direction, Space
from dyncp.plan.rooms import INPUTS, OUTPUTS


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """`inputs` are q, k, v, in backward also dout and delta, and lse, which forward writes. `sums`
    are out, or dq, dk, dv; `partial` is room for results before they are merged."""

    inputs: dict[str, Tensor]
    sums: dict[str, Sums]
    partial: dict[str, Tensor]
    own: Any = None  # accumulators of a settling kernel

    def gradients(self) -> Gradients:
        return Gradients(self.sums["dq"], self.sums["dk"], self.sums["dv"], self.own)


class Opener:
    """Makes the workspaces of one rank and head group from the caller's tensors and the rooms of
    the call. All that is the same in every call is found here, before the first."""

    def __init__(self, lowered: LoweredProgram, views: Views, group: int) -> None:
        own, direction = lowered.local_rows, lowered.direction
        rooms = {name: room for (name, g), room in views.rooms.items() if g == group}
        given = [name for space in Space for name in INPUTS[direction][space]]
        results = [name for space in Space for name in OUTPUTS[direction][space]]
        (results if direction is Direction.FORWARD else given).append("lse")
        self.calls = [call for calls in lowered.calls.values() for g, call in calls if g == group]
        partials = ((name, rooms.get(f"{name}_partial")) for name in results)
        self.partial = {name: room for name, room in partials if room is not None}
        self._inputs = {name: rooms[name] for name in (*given, "lse", "delta") if name in rooms}
        self._copied = [(name, rooms[name][:own]) for name in given if name in rooms]
        self._returned = [(name, rooms[name][:own]) for name in results if name in rooms]
        # Rows between slots are read as part of kernel tiles: they count nothing, but 0 × NaN would
        # be NaN.
        read = (rooms[name] for name in (*given, "delta") if name in rooms)
        self._tails = [room[own:] for room in read if len(room) > own]
        self._sums = [
            (name, rooms.get(name), rooms.get(f"{name}_wide"), self._partial_of(name))
            for name in results
            if name != "lse"
        ]
        self._empty = [
            (name, rows)
            for name, *_ in self._sums
            for rows in lowered.empty_rows.get((space_of(name), group), ())
        ]
        self.own_delta = rooms["delta"][:own] if "delta" in rooms else None

    def _partial_of(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Outputs are merged together with their log-sum-exps."""
        is_merged = name == "out" and name in self.partial
        return (self.partial["out"], self.partial["lse"]) if is_merged else None

    def open_inputs(
        self, given: dict[str, Tensor], results: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """`given` are read, `results` written: the rank's own rows, this head group's heads."""
        for name, rows in self._copied:
            rows.copy_(given[name])
        for rows in self._tails:
            rows.zero_()
        inputs = given | self._inputs
        if "lse" not in inputs:
            inputs["lse"] = results["lse"]
        return inputs

    def open_sums(self, inputs: dict[str, Tensor], results: dict[str, Tensor]) -> dict[str, Sums]:
        sums = {}
        for name, room, wide, partial in self._sums:
            final = results[name] if room is None else room
            is_wide = final.dtype in (torch.float32, torch.float64)
            sums[name] = Sums(final, final if is_wide else wide, partial)
        self._clear_empty_rows(inputs, sums)
        return sums

    def close(self, results: dict[str, Tensor]) -> None:
        """Copies own rows of results that lie in a room to where the caller gets them."""
        for name, rows in self._returned:
            results[name].copy_(rows)

    def _clear_empty_rows(self, inputs: dict[str, Tensor], sums: dict[str, Sums]) -> None:
        """Rows that nothing is added to give 0, and log-sum-exp −∞."""
        for name, rows in self._empty:
            sums[name].final[rows].zero_()
            if name == "out":
                inputs["lse"][rows].fill_(-torch.inf)
