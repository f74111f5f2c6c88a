"""The order in which the host launches a rank's device work and messages.

On the CPU, and on GPUs without graphs, this is the order of the plan's program. With graphs, the
host does as little as possible: a segment of work is one graph, which itself waits for messages and
marks what is ready to be sent. A segment ends only before a wait for messages that depend on
the segment. A GPU executes the same either way, since messages wait for marks, not for the host.
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

START = -1  # before the first instruction: local rows are ready


def ready_times(program: RankProgram) -> dict[int, int]:
    """For each phase of this rank: the index of the instruction after which all that it sends is
    ready."""
    launched = times_of(program.program, Op.LAUNCH)
    ready = {int(phase): START for phase in np.flatnonzero(launched >= 0)}
    phases = program.program.sends.phase.tolist()
    for phase, time in zip(phases, _send_times(program).tolist(), strict=True):
        ready[phase] = max(ready[phase], time)
    return ready


def _send_times(program: RankProgram) -> Int64:
    """For each payload that this rank sends: the instruction after which it is ready."""
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
    """Start the messages of these phases, in this order."""

    phases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the messages of a phase."""

    phase: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Record an event after all work so far. Phases that are ready at `time` wait for it."""

    time: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the kernel calls of a division."""

    division: int
    time: int


@dataclass(frozen=True, slots=True)
class RowWork:
    """Copy and add up the rows that are due after the instruction at `time`."""

    time: int


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A segment: work of the device between two communication points of the host."""

    items: tuple["Wait | Mark | Compute | RowWork", ...]

    @property
    def waits(self) -> tuple[int, ...]:
        return tuple(item.phase for item in self.items if isinstance(item, Wait))


Instructions = Sequence[tuple[Op, int]]
Order = list[Launch | Wait | Mark | DeviceWork]


def program_order(
    instructions: Instructions, ready: Mapping[int, int], row_work: AbstractSet[int]
) -> Order:
    """Each instruction separately. `row_work` are the times that row work follows."""
    marked, order = set(ready.values()), Order([Mark(START)])
    for time, (op, argument) in enumerate(instructions):
        if op is Op.COMPUTE:
            order.append(DeviceWork((Compute(argument, time),)))
        else:
            order.append(Launch((argument,)) if op is Op.LAUNCH else Wait(argument))
        if time in row_work:
            order.append(DeviceWork((RowWork(time),)))
        if time in marked:
            order.append(Mark(time))
    return order


def graph_order(
    instructions: Instructions, ready: Mapping[int, int], row_work: AbstractSet[int]
) -> Order:
    """As few segments as the dependencies between messages allow."""
    return _GraphOrder(instructions, ready, row_work).order


class _GraphOrder:
    def __init__(
        self, instructions: Instructions, ready: Mapping[int, int], row_work: AbstractSet[int]
    ) -> None:
        self._ready, self._row_work = ready, row_work
        self._queue = [phase for op, phase in instructions if op is Op.LAUNCH]
        self._items: list[Wait | Mark | Compute | RowWork] = []
        self._marked = START  # the latest mark so far
        self.order = Order([Mark(START)])
        self._launch()
        for time, (op, argument) in enumerate(instructions):
            self._add(time, op, argument)
        self._close()

    def _add(self, time: int, op: Op, argument: int) -> None:
        if op is Op.COMPUTE:
            self._items.append(Compute(argument, time))
        elif op is Op.WAIT:
            if argument in self._queue:  # its messages depend on this segment
                self._end_segment()
            self._items.append(Wait(argument))
        if time in self._row_work:
            self._items.append(RowWork(time))
        if time in self._ready.values():
            self._items.append(Mark(time))

    def _end_segment(self) -> None:
        if self._items:
            self.order.append(DeviceWork(tuple(self._items)))
            marks = [item.time for item in self._items if isinstance(item, Mark)]
            self._marked = max([self._marked, *marks])
            self._items = []
        self._launch()

    def _launch(self) -> None:
        """Launches the phases that are ready. All ranks launch phases in increasing order."""
        count = 0
        while count < len(self._queue) and self._ready[self._queue[count]] <= self._marked:
            count += 1
        if count:
            self.order.append(Launch(tuple(self._queue[:count])))
            del self._queue[:count]

    def _close(self) -> None:
        """Leaves the last waits outside of graphs: what follows them uses the caller's tensors."""
        waits: list[Wait] = []
        while self._items and isinstance(last := self._items[-1], Wait):
            waits.insert(0, last)
            self._items.pop()
        self._end_segment()
        self.order += waits


class GraphStream(IntEnum):
    """The parallel streams of a graph. Launches on the same stream run in order."""

    KERNELS = 0
    OTHER_KERNELS = 1
    COPIES = 2
    SUMS = 3


class LaunchKind(IntEnum):
    """What is launched: a wait for messages, copies, a kernel call, sums, or a mark."""

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
    launches: Sequence[tuple[LaunchKind, int]], freed: Mapping[int, int], *, calls_depend: bool
) -> list[tuple[GraphStream, list[int]]]:
    """The stream of every launch (kind, time), and the earlier launches on other streams that it
    waits for.

    Unless `calls_depend` on each other, kernel calls alternate between two streams, so that a call
    can start on multiprocessors that the previous call no longer needs. Copies wait for the last
    use of the slots that they fill: everything up to time `freed[time]`."""
    assigned: list[tuple[GraphStream, list[int]]] = []
    launched: dict[GraphStream, list[int]] = {stream: [] for stream in GraphStream}
    num_kernels = 0
    for number, (kind, time) in enumerate(launches):
        if kind is LaunchKind.KERNEL:
            stream = GraphStream(0 if calls_depend else num_kernels % 2)
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
    """For each time at which slots are filled again: the time of their last use before it."""
    slots, freed = program.program.slots, dict[int, int]()
    earlier, later = program.refills
    for time, last in zip(slots.first[later].tolist(), slots.last[earlier].tolist(), strict=True):
        freed[time] = max(freed.get(time, START), last)
    return freed
