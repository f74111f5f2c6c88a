"""Runs a rank's program. Resumable, so that one thread can drive many ranks."""

from collections.abc import Generator, Sequence

from torch import Tensor

from dyncp.executor.lowering import LoweredProgram
from dyncp.executor.messages import Piece, allocate, pack, unpack
from dyncp.executor.workspace import Workspace
from dyncp.kernels import Kernel
from dyncp.plan import Direction, Op
from dyncp.transport import Channel, TransportError


class Runner:
    """One rank's run of one program. `run` yields whenever it must wait for another rank of this
    process."""

    def __init__(
        self,
        program: LoweredProgram,
        workspaces: list[Workspace],
        kernel: Kernel,
        channel: Channel,
        scale: float,
    ) -> None:
        self._program, self._workspaces = program, workspaces
        self._kernel, self._channel, self._scale = kernel, channel, scale
        self._incoming: dict[int, dict[int, list[Piece]]] = {}
        self.last_finished = "none"

    def run(self) -> Generator[None, None, None]:
        for op, argument in self._program.instructions:
            if op is Op.WAIT:
                while not self._channel.ready(argument):
                    yield
            try:
                self._do(op, argument)
            except TransportError as error:
                raise TransportError(self._where(f"{op.name} {argument}", error)) from error
            self.last_finished = f"{op.name} {argument}"
        try:
            self._channel.finish()
        except TransportError as error:
            raise TransportError(self._where("the end", error)) from error

    def _where(self, instruction: str, error: Exception) -> str:
        direction = self._program.direction.name.lower()
        return f"{error} [{direction}, at {instruction}; last finished: {self.last_finished}]"

    def _do(self, op: Op, argument: int) -> None:
        if op is Op.LAUNCH:
            self._launch(argument)
        elif op is Op.WAIT:
            self._wait(argument)
        else:
            self._compute(argument)

    def _launch(self, phase: int) -> None:
        sends = self._program.sends.get(phase, {})
        messages = {peer: pack(entries, self._workspaces) for peer, entries in sends.items()}
        buffers, pieces = {}, {}
        for peer, entries in self._program.receives.get(phase, {}).items():
            buffers[peer], pieces[peer] = allocate(entries, self._workspaces)
        if pieces:
            self._incoming[phase] = pieces
        self._channel.launch(phase, messages, buffers)

    def _wait(self, phase: int) -> None:
        self._channel.wait(phase)
        pieces = self._incoming.pop(phase)
        for peer, entries in self._program.receives[phase].items():
            unpack(entries, pieces[peer], self._workspaces)

    def _compute(self, division: int) -> None:
        for group, lowered in self._program.calls[division]:
            self._call_kernel(lowered, self._workspaces[group].tensors)

    def _call_kernel(self, lowered: object, rows: dict[str, Tensor]) -> None:
        q, k, v, lse = rows["q"], rows["k"], rows["v"], rows["lse"]
        if self._program.direction is Direction.FORWARD:
            self._kernel.attend(lowered, q, k, v, self._scale, rows["out"], lse)
        else:
            grads = (rows["dq"], rows["dk"], rows["dv"])
            self._kernel.attend_backward(
                lowered, (q, k, v), rows["dout"], lse, rows["delta"], self._scale, grads
            )


def drive(runners: Sequence[Runner]) -> None:
    """Runs all ranks of this process, round robin, to their ends."""
    active = [(runner, runner.run()) for runner in runners]
    while active:
        before = [runner.last_finished for runner, _ in active]
        active = [(runner, steps) for runner, steps in active if _advance(steps)]
        if active and before == [runner.last_finished for runner, _ in active]:
            stuck = ", ".join(runner.last_finished for runner, _ in active)
            raise TransportError(f"no virtual rank can go on; last finished instructions: {stuck}")


def _advance(steps: Generator[None, None, None]) -> bool:
    """Runs a rank until it must wait; False when it is done."""
    try:
        next(steps)
    except StopIteration:
        return False
    return True
