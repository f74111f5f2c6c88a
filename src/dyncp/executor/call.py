"""One attention call of a prepared plan, forward and backward, on all ranks of this process.

Everything that is the same in every call (tensors, tables, kernel arguments) is bound before the
first call, as a list of steps that are then only run. The caller's tensors are in the `Frame`.
"""

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor

from dyncp.executor.engine import Arena, Engine
from dyncp.executor.graphs import (
    BoundStep,
    Frame,
    Segment,
    Streams,
    Work,
    drive,
    run_rank,
)
from dyncp.executor.kernel_calls import WHOLE_TILE
from dyncp.executor.layout import INPUT_NAMES
from dyncp.executor.order import (
    START,
    Compute,
    DeviceWork,
    Launch,
    LaunchKind,
    Mark,
    RowWork,
    Wait,
    assign_streams,
    freed_times,
    graph_order,
    program_order,
)
from dyncp.executor.row_work import RESULTS, RankCall
from dyncp.executor.step import CallLayout, PreparedPlan
from dyncp.kernels import BackwardInputs, Dtypes, Gradients, Memory, Sums, accumulator_dtype
from dyncp.kernels.row_ops import Results
from dyncp.plan import Direction, Space
from dyncp.plan.buffers import INPUTS, padded_rows
from dyncp.transport import Channel

ALIGNMENT = 16  # bytes: the largest vector load of GPU kernels
NO_RESULTS = Results(())
BoundRank = tuple[list[BoundStep], Streams]
Launched = tuple[LaunchKind, int, Work]  # the int is the time of its instruction
Bound = Callable[[Frame], Any]  # gives a tensor or Sums: a bound one, or one of the frame


def attend_forward(
    prepared: PreparedPlan, mask: str, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (like q), and log-sum-exp [tokens, q heads] in the accumulator dtype, stored heads
    first."""
    out, lse = empty_like(q), empty_per_head(q)
    given = tuple(dense_rows(x) for x in (q, k, v))
    use = prepared.engine.use_of_graphs()
    frame = Frame(given, None, None, Results((out,), lse), scale, *use)
    _run(prepared, mask, Direction.FORWARD, frame)
    return out, lse


def attend_backward(
    prepared: PreparedPlan,
    mask: str,
    scale: float,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes the gradients of q, k and v to `grads`. `results` are what forward returned."""
    given, (out, lse) = tuple(dense_rows(x) for x in (*inputs, dout)), results
    if prepared.engine.gradients is not None:
        prepared.engine.gradients.ran(prepared.parts[0])
    use = prepared.engine.use_of_graphs()
    frame = Frame(given, lse, dense_rows(out), Results(grads), scale, *use)
    _run(prepared, mask, Direction.BACKWARD, frame)


def empty_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor, whatever the strides of `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_per_head(q: Tensor) -> Tensor:
    """An empty tensor [rows, q heads] in the accumulator dtype, stored heads first."""
    num_rows, heads, _ = q.shape
    rows, dtype = padded_rows(num_rows), accumulator_dtype(q.dtype)
    padded = torch.empty_strided((rows, heads), (1, rows), dtype=dtype, device=q.device)
    return padded if rows == num_rows else padded[:num_rows]


def dense_rows(x: Tensor) -> Tensor:
    """`x` as kernels read it, copied if necessary. The heads of a row must be contiguous. Rows may
    have any stride, but on GPUs each row must be aligned for the largest possible vector loads."""
    if x.is_contiguous() and (not x.is_cuda or x.data_ptr() % ALIGNMENT == 0):
        return x  # nearly always
    _, heads, dim = x.shape
    of_row, of_heads, of_dim = x.stride()
    dense = (of_dim == 1 or dim == 1) and (of_heads == dim or heads == 1)
    if dense and x.is_cuda:
        size = x.element_size()
        border = gcd(ALIGNMENT, dim * size)
        dense = x.data_ptr() % border == 0 and of_row * size % border == 0
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def _run(prepared: PreparedPlan, mask: str, direction: Direction, frame: Frame) -> None:
    """Runs one call. Calls are serialised, since they share the executor's memory and messages."""
    engine = prepared.engine
    engine.begin_call()
    try:
        layout = prepared.layout(mask, direction, *frame.given[:2])
        ranks = _bound_ranks(prepared, layout, engine.arena(), captured=frame.captured)
        channels = engine.transport.open(layout.number)
        try:
            drive(
                [
                    run_rank(steps, direction, frame, channel)
                    for (steps, _), channel in zip(ranks, channels, strict=True)
                ]
            )
        finally:  # also after a failed call: the next one uses the same memory
            for _, streams in ranks:
                streams.join()
    finally:
        engine.lock.release()


def _bound_ranks(
    prepared: PreparedPlan, layout: CallLayout, arena: Arena, *, captured: bool
) -> list[BoundRank]:
    base = arena.take(layout.num_bytes, prepared.num_bytes)
    bound = arena.views(layout)
    if not bound:  # the first call on this stream, or in this memory
        for arrays in layout.arrays:
            arrays.wait()
    if captured not in bound:
        with torch.inference_mode(False):  # calls outside inference mode use the same tensors
            binders = [
                _Binder(call, base, layout.dtypes, prepared.engine, captured=captured)
                for call in layout.ranks
            ]
            bound[captured] = [(list(binder.steps()), binder.streams) for binder in binders]
    return cast(list[BoundRank], bound[captured])


class _Binder:
    """Binds one rank's call. `base` is the memory of the whole call, uint8. `captured`: the caller
    is capturing the call in a graph of its own."""

    def __init__(
        self, call: RankCall, base: Tensor, dtypes: Dtypes, engine: Engine, *, captured: bool
    ) -> None:
        self._call, self._layout, self._program = call, call.layout, call.layout.program
        self._base, self._memory = base, Memory.of(base, dtypes)
        self._one_dtype = dtypes.wide == dtypes.input  # sums and results have the same dtype
        self._parallel = engine.graphs.parallel
        has_messages = self._program.has_messages
        self.streams = engine.streams(has_messages=has_messages, captured=captured)
        first = call.layout.first_row
        self._local_rows = slice(first, first + self._program.part.local_rows)

    def steps(self) -> Iterator[BoundStep]:
        call, program = self._call, self._program
        fixed = program.style.fixed and program.has_messages
        make_order = graph_order if fixed else program_order
        order = make_order(program.instructions, call.ready, {*call.copies, *call.sums})
        inside = {p for item in order if isinstance(item, DeviceWork) for p in item.waits}
        opening = list(self._opening())
        if opening:
            yield BoundStep(Segment(opening, fixed=False).run, (), "start")
        for item in order:
            if isinstance(item, DeviceWork):
                launches = [launch for x in item.items for launch in self._launches(x)]
                if launches:
                    segment = self._segment(launches, fixed=fixed)
                    yield BoundStep(segment.run, item.waits, str(item))
            elif isinstance(item, Launch):
                phases = ", ".join(map(str, item.phases))
                yield BoundStep(self._launch(item.phases, inside), (), f"LAUNCH {phases}")
            elif isinstance(item, Wait):
                yield BoundStep(_wait(item.phase), (item.phase,), f"WAIT {item.phase}")
            else:
                yield BoundStep(_mark(self.streams, item.time), (), str(item))
        combine, memory = call.sums.get(len(program.instructions)), self._memory
        if combine is not None:
            yield BoundStep(lambda f, _: combine(memory, f.results, f.scale), (), "the end")

    def _segment(self, launches: list[Launched], *, fixed: bool) -> Segment:
        """A segment that uses several streams, unless a kernel tile can hold rows of several slots:
        a call would then read rows that a copy is still writing."""
        program, streams = self._program, None
        if fixed and self._parallel and not program.part.slot_alignment % WHOLE_TILE:
            kinds, depend = [(kind, time) for kind, time, _ in launches], program.calls_depend
            streams = assign_streams(kinds, freed_times(program), calls_depend=depend)
        return Segment([work for *_, work in launches], fixed=fixed, streams=streams)

    def _launch(
        self, phases: tuple[int, ...], inside: set[int]
    ) -> Callable[[Frame, Channel], None]:
        """Starts the messages of each phase once the device has reached the phase's mark; a later
        mark implies the earlier ones. `inside` are phases that graphs wait for, by events."""
        ready, streams, messages = self._call.ready, self.streams, []
        for phase in phases:
            sends, receives = (
                {peer: self._base[where] for peer, where in fields.peers.get(phase, {}).items()}
                for fields in (self._layout.sends, self._layout.receives)
            )
            arrived = streams.arrived(phase) if phase in inside else None
            messages.append((phase, sends, receives, arrived))

        def launch(_: Frame, channel: Channel) -> None:
            reached = START - 1
            with streams.communicating():
                for message in messages:
                    time = ready[message[0]]
                    if time > reached:
                        streams.wait_for(time)
                        reached = time
                    channel.launch(*message)

        return launch

    def _opening(self) -> Iterator[Work]:
        """Everything that reads the caller's inputs: clears sums, computes row sums, copies local
        rows."""
        program, memory, make_row_sums = self._program, self._memory, self._call.row_sums
        if make_row_sums is not None:
            cleared, dout = self._layout.cleared(memory), INPUT_NAMES.index("dout")
            padded = program.part.local_rows > program.part.local_tokens

            def clear(_: Frame) -> None:
                cleared.zero_()

            if program.style.collects or program.has_messages or padded:
                yield clear

            def row_sums(frame: Frame) -> None:
                assert frame.out is not None
                assert frame.lse is not None
                make_row_sums(memory, frame.given[dout], frame.out, frame.lse)

            yield row_sums
        copy = self._call.copies.get(START)
        if copy is not None:
            yield lambda f: copy(memory, f.given, f.lse)
        for _, _, work in self._sums(START):
            yield work

    def _launches(self, item: Wait | Mark | Compute | RowWork) -> Iterator[Launched]:
        if isinstance(item, Wait):
            arrived = self.streams.arrived(item.phase)
            yield LaunchKind.WAIT, START, lambda _: arrived.wait()
        elif isinstance(item, Mark):
            marked = self.streams.marked(item.time)
            yield LaunchKind.MARK, item.time, lambda _: marked.record()
        elif isinstance(item, RowWork):
            copy, memory = self._call.copies.get(item.time), self._memory
            if copy is not None:
                yield LaunchKind.COPY, item.time, lambda _: copy(memory, (), None)
            yield from self._sums(item.time)
        else:
            for group, call in self._program.calls[item.division]:
                bound = self._kernel_call(item.division, group, call)
                yield LaunchKind.KERNEL, item.time, bound

    def _sums(self, time: int) -> Iterator[Launched]:
        """Sums for rows that are sent to other ranks."""
        combine, memory = self._call.sums.get(time), self._memory
        if combine is not None:
            yield LaunchKind.SUM, time, lambda f: combine(memory, NO_RESULTS, f.scale)

    def _kernel_call(self, division: int, group: int, call: Any) -> Work:
        """Tensors in buffers are bound now, the caller's are sliced out of each call's frame."""
        kernel, direction = self._program.kernel, self._program.direction
        inputs = [self._input(name, group) for space in Space for name in INPUTS[direction][space]]
        if not self._program.backward:
            out, of_rows = self._result("out", division, group), self._lse(division, group)

            def attend(frame: Frame) -> None:
                q, k, v = (x(frame) for x in inputs)
                kernel.attend(call, q, k, v, frame.scale, out(frame), of_rows(frame))

            return attend
        lse, delta = (
            self._layout.tensor(self._memory, (name, group, -1)) for name in ("lse", "delta")
        )
        grads = [self._result(name, division, group) for name in ("dq", "dk", "dv")]

        def attend_backward(frame: Frame) -> None:
            q, dout, k, v = (x(frame) for x in inputs)
            sums = Gradients(*(grad(frame) for grad in grads))
            given = BackwardInputs(q, k, v, dout, lse, delta)
            kernel.attend_backward(call, given, frame.scale, sums)

        return attend_backward

    def _buffer(self, name: str, group: int, division: int = -1) -> Tensor | None:
        """The buffer of a head group, shared by all calls or for one; None if the caller's tensor
        is used instead."""
        for key in (
            (name, group, -1),
            (f"{name}_sums", group, -1),
            (f"{name}_call", group, division),
        ):
            if key in self._layout.buffers:
                return self._layout.tensor(self._memory, key)
        return None

    def _input(self, name: str, group: int) -> Bound:
        buffer = self._buffer(name, group)
        if buffer is not None:
            return lambda _: buffer
        index, rows = INPUT_NAMES.index(name), self._local_rows
        heads = self._layout.heads(name, group)
        return lambda frame: frame.given[index][rows, heads]

    def _result(self, name: str, division: int, group: int) -> Bound:
        """The tensors that a call writes a result to, or adds it to."""
        buffer, wide = self._buffer(name, group, division), self._buffer(f"{name}_wide", group)

        def sums(final: Tensor) -> Sums:
            return Sums(final, final if self._one_dtype else wide)

        if buffer is not None:
            bound = sums(buffer)
            return lambda _: bound
        index, heads = RESULTS[name], self._layout.heads(name, group)
        rows = self._result_rows(division, group)
        return lambda frame: sums(frame.results.rows[index][rows, heads])

    def _lse(self, division: int, group: int) -> Bound:
        """The tensor that a forward call writes its log-sum-exps to."""
        buffer = self._buffer("lse", group, division)
        if buffer is not None:
            return lambda _: buffer
        rows, heads = self._result_rows(division, group), self._layout.heads("lse", group)

        def of_caller(frame: Frame) -> Tensor:
            assert frame.results.lse is not None
            return frame.results.lse[rows, heads]

        return of_caller

    def _result_rows(self, division: int, group: int) -> slice:
        """Rows of the caller's tensors that a call gets: all local rows, or, if the kernel does not
        merge, those that it writes."""
        rows = self._local_rows
        if self._program.backward or self._program.style.merges:
            return rows
        hull, _ = self._program.call_rows[division, group]
        return slice(rows.start + hull.start, rows.start + hull.stop)


def _wait(phase: int) -> Callable[[Frame, Channel], None]:
    return lambda _, channel: channel.wait(phase)


def _mark(streams: Streams, time: int) -> Callable[[Frame, Channel], None]:
    return lambda _frame, _channel: streams.mark(time)
