"""One attention call of a prepared step, forward and backward, on all ranks of this process."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from dyncp.executor.arena import Arena
from dyncp.executor.layout import Views
from dyncp.executor.run import Runner, drive
from dyncp.executor.step import CallLayout, Step
from dyncp.executor.workspace import Opener, Workspace
from dyncp.kernels import SettlingKernel, accumulator_dtype
from dyncp.plan import Direction
from dyncp.plan.rooms import padded_rows

Tensors = dict[str, Tensor]
KEY_TENSORS = ("k", "v", "dk", "dv")


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
    given = {"q": _dense_rows(q), "k": _dense_rows(k), "v": _dense_rows(v)}
    out, lse = empty_like(q), empty_per_head(q)
    layout = step.layout(options.mask, Direction.FORWARD, q, k)
    _Call(step, layout, options.scale).run(given, {"out": out, "lse": lse})
    return out, lse


def attend_backward(step: Step, options: CallOptions, given: Tensors, results: Tensors) -> None:
    """Writes the gradients dq, dk, dv of `results`, from q, k, v, out, dout and the log-sum-exps of
    `given`."""
    layout = step.layout(options.mask, Direction.BACKWARD, given["q"], given["k"])
    given = given | {name: _dense_rows(given[name]) for name in ("q", "k", "v", "dout", "out")}
    _Call(step, layout, options.scale).run(given, results)


def empty_like(x: Tensor) -> Tensor:
    """Contiguous, whatever the strides of `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_per_head(q: Tensor) -> Tensor:
    """[rows, q heads] in the accumulator dtype, heads first in memory."""
    num_rows, heads, _ = q.shape
    rows, dtype = padded_rows(num_rows), accumulator_dtype(q.dtype)
    padded = torch.empty_strided((rows, heads), (1, rows), dtype=dtype, device=q.device)
    return padded[:num_rows]


def _dense_rows(x: Tensor) -> Tensor:
    """Kernels read rows whose heads lie next to each other; the stride of rows is free."""
    _, heads, dim = x.shape
    _, of_heads, of_dim = x.stride()
    dense = (of_dim == 1 or dim == 1) and (of_heads == dim or heads == 1)
    return x if dense else x.contiguous()


@dataclass(frozen=True, slots=True)
class _Place:
    """What calls have in an arena on one rank, found once per buffer."""

    views: Views
    openers: list[Opener]  # per head group


class _Call:
    """All ranks of this process, in one direction."""

    def __init__(self, step: Step, layout: CallLayout, scale: float) -> None:
        self._engine, self._layout, self._scale = step.engine, layout, scale
        self._num_bytes = step.num_bytes

    def run(self, given: Tensors, results: Tensors) -> None:
        engine, arena, layout = self._engine, self._engine.arena(), self._layout
        layout.wait_for_indices()
        arena.reset(self._num_bytes)
        runners, opened, streams, first = [], [], [], 0
        places, channels = self._places(arena), engine.transport.open()
        for rank, place, channel in zip(layout.ranks, places, channels, strict=True):
            rows = slice(first, first + rank.lowered.local_rows)
            first, spaces = rows.stop, []
            for group, opener in enumerate(place.openers):
                own = self._cut(given, rows, group), self._cut(results, rows, group)
                spaces.append(self._open(opener, *own, arena))
                opened.append((opener, own[1]))
            streams.append(engine.streams(has_messages=rank.lowered.has_messages))
            parts = (engine.kernel, engine.row_ops, channel, streams[-1])
            runners.append(Runner(rank, place.views, spaces, *parts, self._scale))
        try:
            drive(runners)
        finally:  # also of a call that failed: the next one uses the same memory
            for of_rank in streams:
                of_rank.join()
        for opener, own_results in opened:
            opener.close(own_results)

    def _places(self, arena: Arena) -> list[_Place]:
        layout = self._layout
        places = arena.kept(layout)
        if places is None:
            places, groups = [], range(len(layout.groups))
            for rank in layout.ranks:
                views = rank.views(arena.take(rank.num_bytes), layout.dtypes)
                places.append(_Place(views, [Opener(rank.lowered, views, g) for g in groups]))
            arena.keep(layout, places)
        return cast(list[_Place], places)

    def _cut(self, tensors: Tensors, rows: slice, group: int) -> Tensors:
        """A rank's rows of the heads of a group."""
        if len(self._layout.ranks) > 1:
            tensors = {name: tensor[rows] for name, tensor in tensors.items()}
        if len(self._layout.groups) > 1:
            q_heads, kv_heads = self._layout.heads[group]
            tensors = {
                name: tensor[:, kv_heads if name in KEY_TENSORS else q_heads]
                for name, tensor in tensors.items()
            }
        return tensors

    def _open(self, opener: Opener, given: Tensors, results: Tensors, arena: Arena) -> Workspace:
        inputs, own = opener.open_inputs(given, results), None
        if opener.own_delta is not None:
            inputs["lse"] = _aligned(inputs["lse"], arena)
            self._engine.row_ops.row_sums(given["dout"], given["out"], opener.own_delta)
            if self._engine.kernel.settles:
                kernel = cast(SettlingKernel, self._engine.kernel)
                q, k = inputs["q"], inputs["k"]
                own = kernel.open_gradients(opener.calls, q, k, arena.take_fp32)
        return Workspace(inputs, opener.open_sums(inputs, results), opener.partial, own)


def _aligned(lse: Tensor, arena: Arena) -> Tensor:
    """GPU kernels load log-sum-exps 16 bytes at once. Virtual ranks' rows begin anywhere, and a
    sink's log-sum-exps are not padded."""
    if not lse.is_cuda or (lse.data_ptr() % 16 == 0 and lse.stride(1) % 4 == 0):
        return lse
    num_rows, heads = lse.shape
    rows = padded_rows(num_rows)
    copied = arena.take_fp32(heads * rows).view(heads, rows)[:, :num_rows].T
    return copied.copy_(lse)
