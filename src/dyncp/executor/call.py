"""One attention call of a prepared step, forward and backward, on all ranks of this process."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from dyncp.executor.arena import Arena
from dyncp.executor.layout import RankLayout, Views
from dyncp.executor.run import Runner, drive
from dyncp.executor.step import CallLayout, Step
from dyncp.executor.workspace import Opener, Workspace
from dyncp.kernels import SettlingKernel, accumulator_dtype
from dyncp.plan import Direction, HeadGroup
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
    q, k, v = _dense_rows(q, k, v)
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), empty_per_head(q)
    layout = step.layout(options.mask, Direction.FORWARD, q, k)
    _Call(step, layout, options.scale).run({"q": q, "k": k, "v": v}, {"out": out, "lse": lse})
    return out, lse


def attend_backward(step: Step, options: CallOptions, given: Tensors, results: Tensors) -> None:
    """Writes the gradients dq, dk, dv of `results`, from q, k, v, out, dout and the log-sum-exps of
    `given`."""
    names = ("q", "k", "v", "dout", "out")
    given = given | dict(zip(names, _dense_rows(*(given[n] for n in names)), strict=True))
    layout = step.layout(options.mask, Direction.BACKWARD, given["q"], given["k"])
    _Call(step, layout, options.scale).run(given, results)


def empty_per_head(q: Tensor) -> Tensor:
    """[rows, q heads] in the accumulator dtype, heads first in memory."""
    num_rows, heads = q.shape[:2]
    dtype = accumulator_dtype(q.dtype)
    return torch.empty(heads, padded_rows(num_rows), dtype=dtype, device=q.device)[:, :num_rows].T


def _dense_rows(*tensors: Tensor) -> list[Tensor]:
    """Kernels read rows whose last dimension is contiguous; other strides are free."""
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]


class _Call:
    """All ranks of this process, in one direction."""

    def __init__(self, step: Step, layout: CallLayout, scale: float) -> None:
        self._engine, self._layout, self._scale = step.engine, layout, scale
        self._heads = _heads_of(layout.groups, layout.shape.q_heads_per_kv_head)

    def run(self, given: Tensors, results: Tensors) -> None:
        engine, arena = self._engine, self._engine.arena()
        self._layout.wait_for_indices()
        arena.reset(self._layout.num_bytes)
        runners, opened, first = [], [], 0
        views = [self._views(arena, rank) for rank in self._layout.ranks]
        for rank, view, channel in zip(
            self._layout.ranks, views, engine.transport.open(), strict=True
        ):
            rows = slice(first, first + rank.lowered.local_rows)
            first = rows.stop
            opener, spaces = Opener(rank.lowered, view), []
            for group in range(len(self._heads)):
                own = self._cut(given, rows, group), self._cut(results, rows, group)
                spaces.append(self._open(opener, group, *own, arena))
                opened.append((opener, group, spaces[-1], own[1]))
            parts = (engine.kernel, engine.row_ops, channel, engine.streams())
            runners.append(Runner(rank, view, spaces, *parts, self._scale))
        try:
            drive(runners)
        finally:  # also of a call that failed: the next one uses the same memory
            engine.streams().join()
        for opener, group, workspace, own_results in opened:
            opener.close(group, workspace, own_results)

    def _views(self, arena: Arena, rank: RankLayout) -> Views:
        base = arena.take(rank.num_bytes)
        views = arena.kept(rank)
        if views is None:
            views = rank.views(base, self._layout.dtypes)
            arena.keep(rank, views)
        return cast(Views, views)

    def _cut(self, tensors: Tensors, rows: slice, group: int) -> Tensors:
        """A rank's rows of the heads of a group."""
        if len(self._layout.ranks) > 1:
            tensors = {name: tensor[rows] for name, tensor in tensors.items()}
        if len(self._heads) > 1:
            q_heads, kv_heads = self._heads[group]
            tensors = {
                name: tensor[:, kv_heads if name in KEY_TENSORS else q_heads]
                for name, tensor in tensors.items()
            }
        return tensors

    def _open(
        self, opener: Opener, group: int, given: Tensors, results: Tensors, arena: Arena
    ) -> Workspace:
        if "out" in given:
            given = given | {"lse": _aligned(given["lse"], arena)}
        workspace = opener.open(group, given, results)
        if "out" in given:
            delta = workspace.inputs["delta"][: len(given["out"])]
            self._engine.row_ops.row_sums(given["dout"], given["out"], delta)
            if self._engine.kernel.settles:
                kernel = cast(SettlingKernel, self._engine.kernel)
                q, k = workspace.inputs["q"], workspace.inputs["k"]
                own = kernel.open_gradients(opener.calls_of(group), q, k, arena.take_fp32)
                workspace = replace(workspace, own=own)
        return workspace


def _aligned(lse: Tensor, arena: Arena) -> Tensor:
    """GPU kernels load log-sum-exps 16 bytes at once; virtual ranks' rows begin anywhere."""
    if lse.device.type != "cuda" or lse.data_ptr() % 16 == 0:
        return lse
    num_rows, heads = lse.shape
    rows = padded_rows(num_rows)
    copied = arena.take_fp32(heads * rows).view(heads, rows)[:, :num_rows].T
    return copied.copy_(lse)


def _heads_of(groups: tuple[HeadGroup, ...], repeat: int) -> list[tuple[slice, slice]]:
    """q heads and kv heads of every group."""
    heads = []
    for group in groups:
        first, end = group.first_kv_head, group.first_kv_head + group.num_kv_heads
        heads.append((slice(first * repeat, end * repeat), slice(first, end)))
    return heads
