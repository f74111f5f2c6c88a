"""One attention call of a prepared step, forward and backward, on all ranks of this process."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import cast

import torch
from torch import Tensor

from dyncp.executor.bind import BoundStep, PhaseMessages, bind_rank
from dyncp.executor.engine import Arena, Engine
from dyncp.executor.graphs import Frame, Segment
from dyncp.executor.layout import RankLayout
from dyncp.executor.order import START, Mark, Wait
from dyncp.executor.step import CallLayout, Step
from dyncp.executor.streams import Streams
from dyncp.kernels import Dtypes, accumulator_dtype
from dyncp.kernels.row_ops import Results
from dyncp.plan import Direction
from dyncp.plan.buffers import padded_rows
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


ALIGNMENT = 16  # bytes: GPU kernels load up to so many at once


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What one call may choose: the mask by name and the factor on the scores."""

    mask: str
    scale: float


def attend_forward(
    step: Step, options: CallOptions, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output like q, and log-sum-exp [tokens, q heads] in the accumulator dtype, heads first in
    memory."""
    out, lse = empty_like(q), empty_per_head(q)
    given = tuple(dense_rows(x) for x in (q, k, v))
    use = step.engine.use_of_graphs()
    frame = Frame(given, None, None, Results((out,), lse), options.scale, *use)
    _run(step, options.mask, Direction.FORWARD, frame)
    return out, lse


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What backward needs of forward, and the gradient of its output."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor


def attend_backward(
    step: Step, options: CallOptions, saved: Saved, grads: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Writes the gradients of q, k and v."""
    given = tuple(dense_rows(x) for x in (saved.q, saved.k, saved.v, saved.dout))
    out, use = dense_rows(saved.out), step.engine.use_of_graphs()
    frame = Frame(given, saved.lse, out, Results(grads), options.scale, *use)
    _run(step, options.mask, Direction.BACKWARD, frame)


def empty_like(x: Tensor) -> Tensor:
    """Contiguous, whatever the strides of `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_per_head(q: Tensor) -> Tensor:
    """[rows, q heads] in the accumulator dtype, heads first in memory."""
    num_rows, heads, _ = q.shape
    rows, dtype = padded_rows(num_rows), accumulator_dtype(q.dtype)
    padded = torch.empty_strided((rows, heads), (1, rows), dtype=dtype, device=q.device)
    return padded if rows == num_rows else padded[:num_rows]


def dense_rows(x: Tensor) -> Tensor:
    """Kernels read rows whose heads lie next to each other; the stride of rows is free, but on GPUs
    rows begin where as many bytes as possible can be loaded at once."""
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


@dataclass(frozen=True, slots=True)
class _Rank:
    steps: list[BoundStep]
    streams: Streams


def _run(step: Step, mask: str, direction: Direction, frame: Frame) -> None:
    """One call at a time: its memory, and the messages of its phases, are the executor's."""
    engine = step.engine
    if not engine.lock.acquire(blocking=False):
        engine.wait_for_lock()
    try:
        _run_alone(step, step.layout(mask, direction, *frame.given[:2]), frame)
    finally:
        engine.lock.release()


def _run_alone(step: Step, layout: CallLayout, frame: Frame) -> None:
    engine, arena = step.engine, step.engine.arena()
    ranks = _bound_ranks(step, layout, arena, captured=frame.captured)
    channels = engine.transport.open(layout.call)
    runners = [
        Runner(rank.steps, layout.direction, frame, channel, rank.streams)
        for rank, channel in zip(ranks, channels, strict=True)
    ]
    try:
        drive(runners)
    finally:  # also of a call that failed: the next one uses the same memory
        for rank in ranks:
            rank.streams.join()


def _bound_ranks(step: Step, layout: CallLayout, arena: Arena, *, captured: bool) -> list[_Rank]:
    base = arena.take(layout.num_bytes, step.num_bytes)
    kept = arena.kept(layout)
    if kept is None:  # the first call on this stream, or in this memory
        layout.wait_for_indices()
        kept = {}
        arena.keep(layout, kept)
    ranks = kept.get(captured)
    if ranks is None:
        with torch.inference_mode(False):  # calls in other modes use the same tensors
            ranks = [_bind(x, base, layout.dtypes, step.engine, captured) for x in layout.ranks]
        kept[captured] = ranks
    return cast(list[_Rank], ranks)


def _bind(
    layout: RankLayout, base: Tensor, dtypes: Dtypes, engine: Engine, captured: bool
) -> _Rank:
    streams = engine.streams(has_messages=layout.lowered.has_messages, captured=captured)
    tools = (engine.kernel, engine.row_ops, streams)
    return _Rank(bind_rank(layout, base, dtypes, *tools, beside=engine.graphs.beside), streams)
