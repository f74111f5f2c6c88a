"""The order in which a rank's device and messages are given their work.

On the CPU, and on GPUs without graphs, this is the program's own: everything is started where the
plan says. With graphs as little as possible is left to the host: a segment of computation is one
graph, which itself waits for messages and marks what is ready to be sent. It ends only where it has
to wait for messages that it makes ready itself. GPUs see the same either way, since messages wait
for marks and not for the host.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dyncp.arrays import Int64
from dyncp.executor.kernel_calls import RankProgram
from dyncp.plan import IS_INPUT, Op, Space
from dyncp.plan.buffers import block_keys, result_keys, times_of

START = -1  # the time at which local rows are ready


def ready_times(program: RankProgram) -> dict[int, int]:
    """By phase that this rank takes part in; times are indices of instructions."""
    launched = times_of(program.program, Op.LAUNCH)
    ready = {int(phase): START for phase in np.flatnonzero(launched >= 0)}
    phases = program.program.sends.phase.tolist()
    for phase, time in zip(phases, _send_times(program).tolist(), strict=True):
        ready[phase] = max(ready[phase], time)
    return ready


def _send_times(program: RankProgram) -> Int64:
    """When each payload that this rank sends is ready."""
    part, added = program.part, program.contributions
    sends, received = program.program.sends, program.program.receives
    num_blocks, waits = len(part.blocks), np.append(times_of(program.program, Op.WAIT), START)
    times, arrived = np.full(len(sends), START, np.int64), waits[received.phase]

    relayed = program.relayed_from >= 0
    times[relayed] = arrived[program.relayed_from[relayed]]

    computed = block_keys(added.space, added.head_group, added.block, num_blocks)
    last = np.full(len(part.head_groups) * len(Space) * num_blocks, START, np.int64)
    np.maximum.at(last, computed, added.time)
    np.maximum.at(last, result_keys(received, num_blocks), arrived[~IS_INPUT[received.kind]])
    times[~IS_INPUT[sends.kind]] = last[result_keys(sends, num_blocks)]
    return times


@dataclass(frozen=True, slots=True)
class Launch:
    """Starts the messages of these phases, in this order."""

    phases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """For the messages of a phase."""

    phase: int


@dataclass(frozen=True, slots=True)
class Mark:
    """An event behind all work given so far; phases that are ready at `time` wait for it."""

    time: int


@dataclass(frozen=True, slots=True)
class Compute:
    division: int
    time: int


@dataclass(frozen=True, slots=True)
class RowWork:
    """Rows that are copied and added up after the instruction at `time`."""

    time: int


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What the device does without a communication point of the host: one segment."""

    items: tuple["Wait | Mark | Compute | RowWork", ...]

    @property
    def waits(self) -> tuple[int, ...]:
        return tuple(item.phase for item in self.items if isinstance(item, Wait))


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to do, and the instruction that it belongs to."""

    item: Launch | Wait | Mark | DeviceWork
    name: str


Instructions = Sequence[tuple[Op, int]]


def program_order(
    instructions: Instructions, ready: Mapping[int, int], row_work: AbstractSet[int]
) -> list[Point]:
    """Every instruction by itself. `row_work` are the times after which there is some."""
    marked, points = set(ready.values()), [Point(Mark(START), "start")]
    for time, (op, argument) in enumerate(instructions):
        name = f"{op.name} {argument}"
        if op is Op.COMPUTE:
            points.append(Point(DeviceWork((Compute(argument, time),)), name))
        else:
            points.append(Point(Launch((argument,)) if op is Op.LAUNCH else Wait(argument), name))
        if time in row_work:
            points.append(Point(DeviceWork((RowWork(time),)), name))
        if time in marked:
            points.append(Point(Mark(time), name))
    return points


def graph_order(
    instructions: Instructions, ready: Mapping[int, int], row_work: AbstractSet[int]
) -> list[Point]:
    """As few segments as the dependencies between messages allow."""
    return _GraphOrder(instructions, ready, row_work).points


class _GraphOrder:
    def __init__(
        self, instructions: Instructions, ready: Mapping[int, int], row_work: AbstractSet[int]
    ) -> None:
        self._ready, self._row_work = ready, row_work
        self._queue = [phase for op, phase in instructions if op is Op.LAUNCH]
        self._items: list[Wait | Mark | Compute | RowWork] = []
        self._marked = START  # the latest mark that the device was given
        self.points = [Point(Mark(START), "start")]
        self._launch("start")
        for time, (op, argument) in enumerate(instructions):
            self._add(time, op, argument)
        self._close()

    def _add(self, time: int, op: Op, argument: int) -> None:
        if op is Op.COMPUTE:
            self._items.append(Compute(argument, time))
        elif op is Op.WAIT:
            if argument in self._queue:  # this segment makes ready what it would wait for
                self._end(f"WAIT {argument}")
            self._items.append(Wait(argument))
        if time in self._row_work:
            self._items.append(RowWork(time))
        if time in self._ready.values():
            self._items.append(Mark(time))

    def _end(self, name: str) -> None:
        if self._items:
            self.points.append(Point(DeviceWork(tuple(self._items)), name))
            marks = [item.time for item in self._items if isinstance(item, Mark)]
            self._marked = max([self._marked, *marks])
            self._items = []
        self._launch(name)

    def _launch(self, name: str) -> None:
        """All that is ready, in order: phases are launched in the same order on all ranks."""
        count = 0
        while count < len(self._queue) and self._ready[self._queue[count]] <= self._marked:
            count += 1
        if count:
            self.points.append(Point(Launch(tuple(self._queue[:count])), name))
            del self._queue[:count]

    def _close(self) -> None:
        """What comes last is for the caller's tensors, outside any graph."""
        waits: list[Wait] = []
        while self._items and isinstance(last := self._items[-1], Wait):
            waits.insert(0, last)
            self._items.pop()
        self._end("the end")
        self.points += [Point(wait, "the end") for wait in waits]


class GraphStream(IntEnum):
    """Streams on which the launches of a graph run beside each other, each in its own order."""

    KERNELS = 0
    OTHER_KERNELS = 1
    COPIES = 2
    SUMS = 3


class LaunchKind(IntEnum):
    """What is launched: waiting for messages, copies, a kernel call, sums, a mark."""

    WAIT = 0
    COPY = 1
    KERNEL = 2
    SUM = 3
    MARK = 4


STREAMS = {
    LaunchKind.WAIT: GraphStream.COPIES,
    LaunchKind.COPY: GraphStream.COPIES,
    LaunchKind.SUM: GraphStream.SUMS,
    LaunchKind.MARK: GraphStream.SUMS,
}
AFTER: dict[LaunchKind, tuple[GraphStream, ...]] = {
    LaunchKind.WAIT: (),
    LaunchKind.COPY: (GraphStream.KERNELS, GraphStream.OTHER_KERNELS, GraphStream.SUMS),
    LaunchKind.KERNEL: (GraphStream.COPIES,),
    LaunchKind.SUM: (GraphStream.KERNELS, GraphStream.OTHER_KERNELS, GraphStream.COPIES),
    LaunchKind.MARK: (GraphStream.COPIES,),
}


def assign_streams(
    launches: Sequence[tuple[LaunchKind, int]], freed: Mapping[int, int], *, in_turn: bool
) -> list[tuple[GraphStream, list[int]]]:
    """The stream of every launch (kind, time), and earlier launches on other streams that it comes
    after.

    Kernel calls alternate between two streams, so that one begins on multiprocessors that the one
    before has left, unless they run `in_turn`. Copies wait for what used their slots before: all
    that was due by `freed[time]`."""
    assigned: list[tuple[GraphStream, list[int]]] = []
    launched: dict[GraphStream, list[int]] = {stream: [] for stream in GraphStream}
    num_kernels = 0
    for number, (kind, time) in enumerate(launches):
        if kind is LaunchKind.KERNEL:
            stream = GraphStream(0 if in_turn else num_kernels % 2)
            num_kernels += 1
        else:
            stream = STREAMS[kind]
        until = freed.get(time, START) if kind is LaunchKind.COPY else time
        after = [
            max(before)
            for other in AFTER[kind]
            if other is not stream
            and (before := [x for x in launched[other] if launches[x][1] <= until])
        ]
        assigned.append((stream, after))
        launched[stream].append(number)
    return assigned


def freed_times(program: RankProgram) -> dict[int, int]:
    """When the slots that are filled at a time were last used, by that time."""
    slots, freed = program.program.slots, dict[int, int]()
    earlier, later = program.refills
    for time, last in zip(slots.first[later].tolist(), slots.last[earlier].tolist(), strict=True):
        freed[time] = max(freed.get(time, START), last)
    return freed
