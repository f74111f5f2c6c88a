"""Runs a rank's program. Resumable, so that one thread can drive many ranks."""

from collections.abc import Generator, Sequence

from dyncp.executor.bind import BoundRank, Instruction, Mark
from dyncp.executor.segments import Frame, Segment
from dyncp.executor.streams import Streams
from dyncp.plan import Direction, Op
from dyncp.transport import Channel, TransportError


class Runner:
    """One rank's run of one program. `run` yields whenever it must wait for another rank of this
    process."""

    def __init__(
        self,
        bound: BoundRank,
        direction: Direction,
        frame: Frame,
        channel: Channel,
        streams: Streams,
    ) -> None:
        self._bound, self._direction, self._frame = bound, direction, frame
        self._channel, self._streams = channel, streams
        self.num_finished = 0

    @property
    def last_finished(self) -> str:
        return self._bound.names[self.num_finished - 1] if self.num_finished else "none"

    def run(self) -> Generator[None, None, None]:
        for step, name in zip(self._bound.steps, self._bound.names, strict=True):
            try:
                if isinstance(step, Segment):
                    step.run(self._frame)
                elif isinstance(step, Mark):
                    self._streams.mark(step.time)
                else:
                    while step.op is Op.WAIT and not self._channel.ready(step.phase):
                        yield
                    self._communicate(step)
            except TransportError as error:
                raise TransportError(self._where(name, error)) from error
            self.num_finished += 1
        try:
            self._channel.finish()
        except TransportError as error:
            raise TransportError(self._where("the end", error)) from error

    def _where(self, instruction: str, error: Exception) -> str:
        direction = self._direction.name.lower()
        return f"{error} [{direction}, at {instruction}; last finished: {self.last_finished}]"

    def _communicate(self, step: Instruction) -> None:
        phase = step.phase
        if step.op is Op.WAIT:
            self._channel.wait(phase)
            return
        sends, receives = self._bound.sends.get(phase, {}), self._bound.receives.get(phase, {})
        with self._streams.launching(self._bound.ready[phase]):
            self._channel.launch(phase, sends, receives)


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
