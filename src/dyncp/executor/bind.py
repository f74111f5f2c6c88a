"""BoundRank: one rank's call, laid out in the executor's memory, as steps that only have to be run.

All that is the same in every call is found here, before the first: tensors, tables, and the
arguments of kernels. What the caller brings comes with the `Frame`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dyncp.executor.copying import GIVEN
from dyncp.executor.layout import RankLayout
from dyncp.executor.ready import START
from dyncp.executor.rooms import Key
from dyncp.executor.segments import Frame, Segment, Work
from dyncp.kernels import Dtypes, Gradients, Kernel, Memory, RowOps, Sums
from dyncp.kernels.row_ops import Results
from dyncp.plan import Op, Space, call_rows
from dyncp.plan.rooms import INPUTS

KEY_TENSORS = ("k", "v", "dk", "dv")
NO_RESULTS = Results(())


@dataclass(frozen=True, slots=True)
class Mark:
    """What was given to the device so far is what phases that are ready at `time` wait for."""

    time: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """A communication point: LAUNCH or WAIT."""

    op: Op
    phase: int


BoundStep = Segment | Mark | Instruction


@dataclass(frozen=True, eq=False)
class BoundRank:
    """`sends` and `receives` are one byte tensor per peer, by phase. `names` says which
    instruction every step belongs to."""

    steps: list[BoundStep]
    names: list[str]
    sends: dict[int, dict[int, Tensor]]
    receives: dict[int, dict[int, Tensor]]
    ready: dict[int, int]


def bind_rank(
    layout: RankLayout, base: Tensor, dtypes: Dtypes, kernel: Kernel, row_ops: RowOps
) -> BoundRank:
    """`base` is the memory of the whole call, uint8."""
    builder = _Builder(layout, Memory.of(base, dtypes), dtypes, kernel, row_ops)
    builder.build()
    buffers = [
        {
            phase: {
                peer: base[start + where.start : start + where.stop]
                for peer, where in fields.peers[phase].items()
            }
            for phase, start in ((phase, layout.rooms.at(name, phase)) for phase in fields.peers)
        }
        for name, fields in (("send", layout.sends), ("receive", layout.receives))
    ]
    return BoundRank(
        builder.steps,
        builder.names,
        buffers[0],
        buffers[1],
        dict(layout.ready),
    )


@dataclass
class _Builder:
    layout: RankLayout
    memory: Memory
    dtypes: Dtypes
    kernel: Kernel
    row_ops: RowOps
    steps: list[BoundStep] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    _pending: list[Work] = field(default_factory=list)

    def build(self) -> None:
        lowered = self.layout.lowered
        marked = set(self.layout.ready.values())
        fixed = lowered.style.fixed and lowered.has_messages
        self._open()
        self._flush("start", fixed=False)
        if START in marked:
            self._add(Mark(START), "start")
        for time, (op, argument) in enumerate(lowered.instructions):
            name = f"{op.name} {argument}"
            if op is Op.COMPUTE:
                self._pending += [
                    self._call(argument, g, call) for g, call in lowered.calls[argument]
                ]
            else:
                self._flush(name, fixed=fixed)
                self._add(Instruction(op, argument), name)
            self._pending += self._row_work(time)
            if time in marked:
                self._flush(name, fixed=fixed)
                self._add(Mark(time), name)
        self._flush("the end", fixed=fixed)
        self._pending += self._combine(len(lowered.instructions), to_results=True)
        self._flush("the end", fixed=False)

    def _add(self, step: BoundStep, name: str) -> None:
        self.steps.append(step)
        self.names.append(name)

    def _flush(self, name: str, *, fixed: bool) -> None:
        if self._pending:
            self._add(Segment(self._pending, fixed=fixed), name)
            self._pending = []

    def _open(self) -> None:
        """Row sums, cleared sums, and own rows: all that needs the caller's inputs."""
        lowered, memory, row_ops = self.layout.lowered, self.memory, self.row_ops
        if lowered.backward:
            cleared, sums = self.layout.rooms.cleared(memory), self.layout.row_sums
            base_2 = lowered.style.collects
            padded = lowered.local_rows > lowered.part.local_tokens
            if lowered.style.collects or lowered.has_messages or padded:
                self._pending.append(lambda _: _zero(cleared))

            def row_sums(frame: Frame) -> None:
                assert frame.out is not None
                assert frame.lse is not None
                dout = frame.given[GIVEN.index("dout")]
                row_ops.row_sums(sums, memory, dout, frame.out, frame.lse, base_2=base_2)

            self._pending.append(row_sums)
        table = self.layout.copies.get(START)
        if table is not None:
            self._pending.append(lambda f: row_ops.copy(table, memory, f.given, f.lse))
        self._pending += self._combine(START, to_results=False)

    def _row_work(self, time: int) -> Iterator[Work]:
        """What is due after an instruction."""
        table, row_ops, memory = self.layout.copies.get(time), self.row_ops, self.memory
        if table is not None:
            yield lambda _: row_ops.copy(table, memory, (), None)
        yield from self._combine(time, to_results=False)

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
