"""Runs a rank's program. Resumable, so that one thread can drive many ranks."""

from collections.abc import Generator, Sequence

from dyncp.executor.bind import BoundStep, PhaseMessages
from dyncp.executor.order import Mark, Wait
from dyncp.executor.ready import START
from dyncp.executor.segments import Frame, Segment
from dyncp.executor.streams import Streams
from dyncp.plan import Direction
from dyncp.transport import Channel, TransportError


class Runner:
    """One rank's run of one program. `run` yields whenever it must wait for another rank of this
    process."""

    def __init__(
        self,
        steps: Sequence[BoundStep],
        direction: Direction,
        frame: Frame,
        channel: Channel,
        streams: Streams,
    ) -> None:
        self._steps, self._direction, self._frame = steps, direction, frame
        self._channel, self._streams = channel, streams
        self.num_finished = 0

    @property
    def last_finished(self) -> str:
        return self._steps[self.num_finished - 1].name if self.num_finished else "none"

    def run(self) -> Generator[None, None, None]:
        name = "the end"
        try:
            for step in self._steps:
                name = step.name
                for phase in step.waits:
                    while not self._channel.ready(phase):
                        yield
                self._do(step.action)
                self.num_finished += 1
            name = "the end"
            self._channel.finish()
        except TransportError as error:
            direction = self._direction.name.lower()
            where = f"{direction}, at {name}; last finished: {self.last_finished}"
            raise TransportError(f"{error} [{where}]") from error

    def _do(self, action: Segment | tuple[PhaseMessages, ...] | Wait | Mark) -> None:
        if isinstance(action, Segment):
            action.run(self._frame)
        elif isinstance(action, tuple):
            self._launch(action)
        elif isinstance(action, Wait):
            self._channel.wait(action.phase)
        else:
            self._streams.mark(action.time)

    def _launch(self, phases: tuple[PhaseMessages, ...]) -> None:
        """Each as soon as the device has reached its mark; later marks imply earlier ones."""
        channel, streams, reached = self._channel, self._streams, START - 1
        with streams.communicating():
            for one in phases:
                if one.ready > reached:
                    streams.wait_for(one.ready)
                    reached = one.ready
                channel.launch(one.phase, one.sends, one.receives, one.arrived)


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
