"""One rank's call, laid out in the executor's memory, as steps that only have to be run.

All that is the same in every call is found here, before the first: tensors, tables, and the
arguments of kernels. What the caller brings comes with the `Frame`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dyncp.executor.copying import GIVEN, WHOLE_TILE
from dyncp.executor.graphs import Frame, Placed, Segment, Work
from dyncp.executor.layout import RankLayout
from dyncp.executor.order import (
    START,
    Compute,
    LaneWork,
    Launch,
    Mark,
    RowWork,
    Stretch,
    Wait,
    assign_lanes,
    freed_times,
    long_stretches,
    program_order,
)
from dyncp.executor.rooms import Key
from dyncp.executor.streams import Streams
from dyncp.kernels import Dtypes, Gradients, Kernel, Memory, RowOps, Sums
from dyncp.kernels.row_ops import Results
from dyncp.plan import Space, call_rows
from dyncp.plan.buffers import INPUTS

KEY_TENSORS = ("k", "v", "dk", "dv")
NO_RESULTS = Results(())


@dataclass(frozen=True, slots=True, eq=False)
class PhaseMessages:
    """One byte tensor per peer, each way, and the time at which the phase is ready. `arrived` is
    an event that a graph waits for; None: the channel is asked."""

    phase: int
    sends: Mapping[int, Tensor]
    receives: Mapping[int, Tensor]
    ready: int
    arrived: Any


@dataclass(frozen=True, slots=True, eq=False)
class BoundStep:
    """One thing to do, with the instruction that it belongs to. `waits` are phases whose messages
    other ranks of this process must have sent before."""

    action: Segment | tuple[PhaseMessages, ...] | Wait | Mark
    waits: tuple[int, ...]
    name: str


def bind_rank(
    layout: RankLayout,
    base: Tensor,
    dtypes: Dtypes,
    kernel: Kernel,
    row_ops: RowOps,
    streams: Streams,
    *,
    beside: bool = True,
) -> list[BoundStep]:
    """`base` is the memory of the whole call, uint8; `beside` as in `Graphs`."""
    memory = Memory.of(base, dtypes)
    builder = _Builder(layout, base, memory, dtypes, kernel, row_ops, streams, beside)
    builder.build()
    return builder.steps


@dataclass
class _Builder:
    layout: RankLayout
    base: Tensor
    memory: Memory
    dtypes: Dtypes
    kernel: Kernel
    row_ops: RowOps
    streams: Streams
    beside: bool
    steps: list[BoundStep] = field(default_factory=list)

    def build(self) -> None:
        layout, lowered = self.layout, self.layout.lowered
        fixed = lowered.style.fixed and lowered.has_messages
        order = long_stretches if fixed else program_order
        row_work = {*layout.copies, *layout.combinations}
        points = order(lowered.instructions, layout.ready, row_work)
        inside = {p for x in points if isinstance(x.item, Stretch) for p in x.item.waits}
        self._add_segment(self._open(), "start", fixed=False)
        for point in points:
            item = point.item
            if isinstance(item, Stretch):
                found = [launch for x in item.items for launch in self._work(x)]
                self._add_segment(
                    [work for _, _, work in found],
                    point.name,
                    fixed=fixed,
                    waits=item.waits,
                    lanes=self._lanes([(kind, time) for kind, time, _ in found]),
                )
            elif isinstance(item, Launch):
                messages = tuple(
                    self._messages(phase, inside=phase in inside) for phase in item.phases
                )
                self.steps.append(BoundStep(messages, (), point.name))
            else:
                waits = (item.phase,) if isinstance(item, Wait) else ()
                self.steps.append(BoundStep(item, waits, point.name))
        last = self._combine(len(lowered.instructions), to_results=True)
        self._add_segment(list(last), "the end", fixed=False)

    def _add_segment(
        self,
        work: list[Work],
        name: str,
        *,
        fixed: bool,
        waits: tuple[int, ...] = (),
        lanes: Sequence[Placed] | None = None,
    ) -> None:
        if work:
            self.steps.append(BoundStep(Segment(work, fixed=fixed, lanes=lanes), waits, name))

    def _lanes(self, launches: list[tuple[LaneWork, int]]) -> Sequence[Placed] | None:
        """None where kernel tiles hold rows of several slots, and calls read what others fill."""
        lowered = self.layout.lowered
        if not self.beside or lowered.part.slot_alignment % WHOLE_TILE:
            return None
        return assign_lanes(launches, freed_times(lowered), in_turn=lowered.calls_depend)

    def _messages(self, phase: int, *, inside: bool) -> PhaseMessages:
        layout = self.layout
        sends, receives = (
            {
                peer: self.base[start + where.start : start + where.stop]
                for start in (layout.rooms.at(name, phase),)
                for peer, where in fields.peers[phase].items()
            }
            if phase in fields.peers
            else {}
            for name, fields in (("send", layout.sends), ("receive", layout.receives))
        )
        arrived = self.streams.arrived(phase) if inside else None
        return PhaseMessages(phase, sends, receives, layout.ready[phase], arrived)

    def _work(self, item: Wait | Mark | Compute | RowWork) -> Iterator[tuple[LaneWork, int, Work]]:
        streams = self.streams
        if isinstance(item, Wait):
            arrived = streams.arrived(item.phase)
            yield LaneWork.WAIT, START, lambda _: arrived.wait()
        elif isinstance(item, Mark):
            marked = streams.marked(item.time)
            yield LaneWork.MARK, item.time, lambda _: marked.record()
        elif isinstance(item, RowWork):
            for work in self._copy(item.time):
                yield LaneWork.COPY, item.time, work
            for work in self._combine(item.time, to_results=False):
                yield LaneWork.SUM, item.time, work
        else:
            for group, call in self.layout.lowered.calls[item.division]:
                yield LaneWork.KERNEL, item.time, self._call(item.division, group, call)

    def _open(self) -> list[Work]:
        """Row sums, cleared sums, and own rows: all that needs the caller's inputs."""
        work: list[Work] = []
        lowered, memory, row_ops = self.layout.lowered, self.memory, self.row_ops
        if lowered.backward:
            cleared, sums = self.layout.rooms.cleared(memory), self.layout.row_sums
            base_2 = lowered.style.collects
            padded = lowered.local_rows > lowered.part.local_tokens
            if lowered.style.collects or lowered.has_messages or padded:
                work.append(lambda _: _zero(cleared))

            def row_sums(frame: Frame) -> None:
                assert frame.out is not None
                assert frame.lse is not None
                dout = frame.given[GIVEN.index("dout")]
                row_ops.row_sums(sums, memory, dout, frame.out, frame.lse, base_2=base_2)

            work.append(row_sums)
        table = self.layout.copies.get(START)
        if table is not None:
            work.append(lambda f: row_ops.copy(table, memory, f.given, f.lse))
        return [*work, *self._combine(START, to_results=False)]

    def _copy(self, time: int) -> Iterator[Work]:
        """What is due after an instruction."""
        table, row_ops, memory = self.layout.copies.get(time), self.row_ops, self.memory
        if table is not None:
            yield lambda _: row_ops.copy(table, memory, (), None)

    def _combine(self, time: int, *, to_results: bool) -> Iterator[Work]:
        table, row_ops, memory = self.layout.combinations.get(time), self.row_ops, self.memory
        dim = self.layout.rooms.shape.head_dim
        if table is None:
            return
        if to_results:
            yield lambda f: row_ops.combine(table, memory, f.results, dim, f.scale)
        else:
            yield lambda f: row_ops.combine(table, memory, NO_RESULTS, dim, f.scale)

    def _call(self, division: int, group: int, call: Any) -> Work:
        """One kernel call. Tensors of rooms are bound, the caller's are cut out of the frame."""
        kernel, backward = self.kernel, self.layout.lowered.backward
        names = [n for space in Space for n in INPUTS[self.layout.lowered.direction][space]]
        inputs = [self._input(name, group) for name in names]
        if not backward:
            out, lse = self._output(division, group)

            def attend(frame: Frame) -> None:
                q, k, v = (x(frame) if callable(x) else x for x in inputs)
                kernel.attend(call, q, k, v, frame.scale, _of(out, frame), _of(lse, frame))

            return attend
        lse, delta = (self._room((name, group, -1)) for name in ("lse", "delta"))
        grads = [self._gradient(name, division, group) for name in ("dq", "dk", "dv")]

        def attend_backward(frame: Frame) -> None:
            q, dout, k, v = (x(frame) if callable(x) else x for x in inputs)
            sums = Gradients(*(_of(grad, frame) for grad in grads))
            kernel.attend_backward(call, (q, k, v), dout, lse, delta, frame.scale, sums)

        return attend_backward

    def _room(self, key: Key) -> Tensor:
        return self.layout.rooms.tensor(self.memory, key)

    def _has(self, key: Key) -> bool:
        return key in self.layout.rooms.rooms

    def _input(self, name: str, group: int) -> Any:
        if self._has((name, group, -1)):
            return self._room((name, group, -1))
        index, rows, heads = GIVEN.index(name), self._own_rows(), self._heads(name, group)
        return lambda frame: frame.given[index][rows, heads]

    def _own_rows(self) -> slice:
        first = self.layout.first_row
        return slice(first, first + self.layout.lowered.local_rows)

    def _heads(self, name: str, group: int) -> slice:
        q_heads, kv_heads = self.layout.rooms.heads[group]
        return kv_heads if name in KEY_TENSORS else q_heads

    def _output(self, division: int, group: int) -> tuple[Any, Any]:
        """Where a forward call leaves its output and log-sum-exps."""
        lowered = self.layout.lowered
        if self._has(("out_call", group, division)):
            return (
                Sums(self._room(("out_call", group, division))),
                self._room(("lse_call", group, division)),
            )
        if self._has(("out", group, -1)):
            return self._sums("out", group), self._room(("lse", group, -1))
        rows, heads = self._own_rows(), self._heads("out", group)
        if not lowered.style.merges:
            hull, _ = self._call_rows(division, group)
            rows = slice(rows.start + hull.start, rows.start + hull.stop)

        def lse(frame: Frame) -> Tensor:
            assert frame.results.lse is not None
            return frame.results.lse[rows, heads]

        return self._caller_sums(0, rows, heads, self._wide("out", group)), lse

    def _caller_sums(self, index: int, rows: slice, heads: slice, wide: Tensor | None) -> Any:
        def sums(frame: Frame) -> Sums:
            final = frame.results.rows[index][rows, heads]
            return Sums(final, final if self.dtypes.wide == self.dtypes.input else wide)

        return sums

    def _gradient(self, name: str, division: int, group: int) -> Any:
        collected, of_call = (f"{name}_sums", group, -1), (f"{name}_call", group, division)
        for key in (collected, of_call):
            if self._has(key):
                return Sums(self._room(key))
        if self._has((name, group, -1)):
            return self._sums(name, group)
        index = ("dq", "dk", "dv").index(name)
        rows, heads = self._own_rows(), self._heads(name, group)
        return self._caller_sums(index, rows, heads, self._wide(name, group))

    def _wide(self, name: str, group: int) -> Tensor | None:
        key = (f"{name}_wide", group, -1)
        return self._room(key) if self._has(key) else None

    def _sums(self, name: str, group: int) -> Sums:
        final = self._room((name, group, -1))
        same = self.dtypes.wide == self.dtypes.input
        return Sums(final, final if same else self._wide(name, group))

    def _call_rows(self, division: int, group: int) -> tuple[slice, slice]:
        lowered = self.layout.lowered
        rows = call_rows(
            lowered.part, lowered.mask, lowered.program, lowered.place, lowered.style.row_multiple
        )
        return rows[division, group]


def _of(bound: Any, frame: Frame) -> Any:
    return bound(frame) if callable(bound) else bound


def _zero(tensor: Tensor) -> None:
    tensor.zero_()
