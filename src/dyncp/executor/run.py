"""Runs a rank's program. Resumable, so that one thread can drive many ranks."""

from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dyncp.executor.layout import RankLayout, Settlement, Views
from dyncp.executor.messages import Item, Move
from dyncp.executor.streams import START, Streams
from dyncp.executor.workspace import Workspace
from dyncp.kernels import Kernel, RowOps, SettlingKernel, Sums
from dyncp.plan import Direction, Op, Space, sends_wide
from dyncp.plan.rooms import OUTPUTS
from dyncp.transport import Channel, TransportError


class Runner:
    """One rank's run of one program. `run` yields whenever it must wait for another rank of this
    process."""

    def __init__(
        self,
        layout: RankLayout,
        views: Views,
        workspaces: list[Workspace],
        kernel: Kernel,
        row_ops: RowOps,
        channel: Channel,
        streams: Streams,
        scale: float,
    ) -> None:
        self._layout, self._views, self._workspaces = layout, views, workspaces
        self._lowered = layout.lowered
        self._kernel, self._row_ops, self._scale = kernel, row_ops, scale
        self._channel, self._streams = channel, streams
        self._sends_wide = sends_wide(self._lowered.part)
        self._forward = self._lowered.direction is Direction.FORWARD
        self.num_finished = 0

    @property
    def last_finished(self) -> str:
        return _name(self._lowered.steps[self.num_finished - 1]) if self.num_finished else "none"

    def run(self) -> Generator[None, None, None]:
        marked = self._lowered.marked
        self._streams.mark(START)
        for step in self._lowered.steps:
            time, op, argument = step
            if op is Op.WAIT:
                while not self._channel.ready(argument):
                    yield
            try:
                self._do(op, argument)
            except TransportError as error:
                raise TransportError(self._where(_name(step), error)) from error
            if time in marked:
                self._streams.mark(time)
            self.num_finished += 1
        try:
            self._channel.finish()
        except TransportError as error:
            raise TransportError(self._where("the end", error)) from error

    def _where(self, instruction: str, error: Exception) -> str:
        direction = self._lowered.direction.name.lower()
        return f"{error} [{direction}, at {instruction}; last finished: {self.last_finished}]"

    def _do(self, op: Op | str, argument: int) -> None:
        if op is Op.LAUNCH:
            self._launch(argument)
        elif op is Op.WAIT:
            self._wait(argument)
        elif op is Op.COMPUTE:
            self._compute(argument)
        else:
            for settlement in self._layout.settlements[argument]:
                self._settle(settlement)

    def _launch(self, phase: int) -> None:
        sends, receives = self._views.sends.get(phase), self._views.receives.get(phase)
        with self._streams.launching(self._lowered.ready.get(phase, START)):
            if sends is not None:
                self._clear_empty(phase)
                for move, message in sends.moves:
                    self._pack(move, message)
                self._streams.packed()
            self._channel.launch(
                phase, sends.peers if sends else {}, receives.peers if receives else {}
            )

    def _clear_empty(self, phase: int) -> None:
        for space, group, rows in self._lowered.empty_sends.get(phase, ()):
            workspace = self._workspaces[group]
            for name in OUTPUTS[self._lowered.direction][space]:
                self._sent(workspace.sums[name])[rows].zero_()
            if self._forward:
                workspace.inputs["lse"][rows].fill_(-torch.inf)

    def _sent(self, sums: Sums) -> Tensor:
        """Where results that leave are."""
        return sums.wide if self._sends_wide and sums.wide is not None else sums.final

    def _pack(self, move: Move, message: Tensor) -> None:
        workspace = self._workspaces[move.group]
        if move.item is Item.PARTIAL:
            rows = [self._sent(workspace.sums[field]) for field in move.fields]
        else:
            rows = [workspace.inputs[field] for field in move.fields]
        self._row_ops.pack(move.table, rows, message)

    def _wait(self, phase: int) -> None:
        self._channel.wait(phase)
        self._streams.before_slots_change()
        for space, group, rows in self._lowered.refilled.get(phase, ()):
            own, kernel = self._workspaces[group].own, cast(SettlingKernel, self._kernel)
            clear = kernel.clear_queries if space is Space.Q else kernel.clear_keys
            clear(own, rows)
        buffer = self._views.receives[phase]
        for move, message in buffer.moves:
            self._accept(move, message, buffer.lse)

    def _accept(self, move: Move, message: Tensor, lse: Tensor) -> None:
        """An input fills its slot, a result is merged into its rows."""
        workspace = self._workspaces[move.group]
        if move.item is not Item.PARTIAL:
            rows = [workspace.inputs[field] for field in move.fields]
            self._row_ops.unpack(move.table, message, rows)
        elif move.fields == ("out",):
            out = workspace.sums["out"]
            self._row_ops.merge(move.table, message, lse, out, workspace.inputs["lse"])
        else:
            sums = [workspace.sums[field] for field in move.fields]
            self._row_ops.add(move.table, message, sums)

    def _compute(self, division: int) -> None:
        for group, lowered in self._lowered.calls[division]:
            self._call_kernel(lowered, self._workspaces[group])

    def _call_kernel(self, lowered: Any, workspace: Workspace) -> None:
        rows = workspace.inputs
        q, k, v, lse = rows["q"], rows["k"], rows["v"], rows["lse"]
        if self._forward:
            self._kernel.attend(lowered, q, k, v, self._scale, workspace.sums["out"], lse)
        else:
            grads = workspace.gradients()
            self._kernel.attend_backward(
                lowered, (q, k, v), rows["dout"], lse, rows["delta"], self._scale, grads
            )

    def _settle(self, settlement: Settlement) -> None:
        kernel, rows = cast(SettlingKernel, self._kernel), settlement.rows
        workspace = self._workspaces[settlement.group]
        names = ("dq",) if settlement.space is Space.Q else ("dk", "dv")
        if settlement.table is None:
            targets = [workspace.sums[name].final[rows] for name in names]
        else:
            targets = [workspace.partial[name][: rows.stop - rows.start] for name in names]
        settle = kernel.settle_queries if settlement.space is Space.Q else kernel.settle_keys
        settle(workspace.own, rows, self._scale, *targets)
        if settlement.table is not None:
            for name, target in zip(names, targets, strict=True):
                self._row_ops.add(settlement.table, target.view(-1), [workspace.sums[name]])


def _name(step: tuple[int, Op | str, int]) -> str:
    _, op, argument = step
    return f"{op if isinstance(op, str) else op.name} {argument}"


def drive(runners: Sequence[Runner]) -> None:
    """Runs all ranks of this process, round robin, to their ends."""
    active = [(runner, runner.run()) for runner in runners]
    while active:
        before = [runner.num_finished for runner, _ in active]
        active = [(runner, steps) for runner, steps in active if _advance(steps)]
        if active and before == [runner.num_finished for runner, _ in active]:
            stuck = ", ".join(runner.last_finished for runner, _ in active)
            raise TransportError(f"no virtual rank can go on; last finished instructions: {stuck}")


def _advance(steps: Generator[None, None, None]) -> bool:
    """Runs a rank until it must wait; False when it is done."""
    try:
        next(steps)
    except StopIteration:
        return False
    return True
