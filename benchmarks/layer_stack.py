"""A stack of transformer layers around an attention call, and the time of its iterations.

Layers are Llama's, without embedding and logits: RMSNorm, projections, rotary positions, attention,
RMSNorm, MLP. Everything but attention treats tokens independently, so a rank runs it on its rows.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm, silu

from dyncp.calibrate import Repeats
from dyncp.calibrate.calls import Attend, Run
from dyncp.calibrate.timing import (
    KernelRun,
    host_seconds,
    mark,
    profiled_kernels,
    seconds_between,
    wait_for,
)
from dyncp.cost import ModelConfig

NORM_EPS, ROPE_THETA, WEIGHT_STD = 1e-5, 500_000.0, 0.02
# This many consecutive iterations are profiled; their kernels differ by a percent or two.
PROFILED = 3


class Rotation(NamedTuple):
    """Cosines and sines, the first half of the sines negated: [tokens, 1, head dim] each."""

    cos: Tensor
    sin: Tensor


def rotation_of(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """The rotation of tokens at these positions; computed in fp64."""
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary positions need it to be even")
    exponent = torch.arange(0, head_dim, 2, device=positions.device).double() / head_dim
    angles = positions.double()[:, None, None] * ROPE_THETA**-exponent
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype))


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the pairs (i, i + head dim / 2) of every head of [tokens, heads, head dim]."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * rotation.cos, swapped, rotation.sin)


class LayerStack(nn.Module):
    """`layers` layers with the sizes of `model` and random weights."""

    def __init__(
        self, model: ModelConfig, layers: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers is {layers}; at least 1 is needed")
        self.hidden, self.head_dim = model.hidden, model.head_dim
        self.layers = nn.ModuleList(Layer(model, dtype, device) for _ in range(layers))

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """x and the result are [tokens, hidden]."""
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return x


class Layer(nn.Module):
    """One layer. Plain MLPs (two matrices) have no gate."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, ffn, self.head_dim = model.hidden, model.ffn, model.head_dim
        q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim

        def weight(rows: int, columns: int) -> nn.Parameter:
            drawn = torch.empty(rows, columns, dtype=dtype, device=device)
            return nn.Parameter(drawn.normal_(std=WEIGHT_STD))

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(hidden, dtype=dtype, device=device))

        self.attention_norm, self.mlp_norm = ones(), ones()
        self.to_q, self.to_out = weight(q_width, hidden), weight(hidden, q_width)
        self.to_k, self.to_v = weight(kv_width, hidden), weight(kv_width, hidden)
        self.up, self.down = weight(ffn, hidden), weight(hidden, ffn)
        self.gate = weight(ffn, hidden) if model.mlp_matrices == 3 else None

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        x = x + self._attention(self._norm(x, self.attention_norm), rotation, attend)
        return x + self._mlp(self._norm(x, self.mlp_norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, NORM_EPS)

    def _attention(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q, k, v = (
            linear(x, weight).view(len(x), -1, self.head_dim)
            for weight in (self.to_q, self.to_k, self.to_v)
        )
        out = attend(rotate(q, rotation), rotate(k, rotation), v)
        return linear(out.flatten(1), self.to_out)

    def _mlp(self, x: Tensor) -> Tensor:
        inner = linear(x, self.up)
        inner = silu(inner) if self.gate is None else silu(linear(x, self.gate)) * inner
        return linear(inner, self.down)


def pass_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Replaces attention: returns q without launching a kernel. The gradients of k and v are those
    of the first q heads, so that all weights get gradients."""
    out: Tensor = _PassQueries.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _PassQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, _v: Tensor) -> Tensor:
        ctx.kv_heads = k.shape[1]
        return q.view_as(q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = dout[:, : ctx.kv_heads]
        return dout, first, first


def stack_run(stack: LayerStack, positions: Tensor, attend: Attend) -> Run:
    """Forward and backward of the stack on random rows, with fresh gradients of all weights."""
    like = next(stack.parameters())
    x, dout = (
        torch.randn(len(positions), stack.hidden, dtype=like.dtype, device=like.device)
        for _ in range(2)
    )
    leaves = [x.requires_grad_(), *stack.parameters()]
    rotation = rotation_of(positions.to(like.device), stack.head_dim, like.dtype)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        stack(x, rotation, attend).backward(dout)

    return run


@dataclass(frozen=True, slots=True)
class Steady:
    """Seconds of one iteration without a profiler: median and mean of back-to-back iterations, and
    the host's seconds to queue one on an idle device (on CPUs, the median)."""

    seconds: float
    mean_seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class Kernels:
    """One profiled iteration on a GPU: the number of kernels, copies and fills, the sum of their
    durations, the sum for attention kernels only, and the time in which at least one runs."""

    count: float
    seconds: float
    attention_seconds: float
    busy_seconds: float


def time_steady(run: Run, device: torch.device, repeats: Repeats) -> Steady:
    """Wall and host time of `run`, which ends on the current stream."""
    for _ in range(repeats.warm_up):
        run()
    marks = [mark(device)]
    for _ in range(repeats.timed):
        run()
        marks.append(mark(device))
    wait_for(device)
    between = [seconds_between(start, end) for start, end in pairwise(marks)]
    wall, mean = statistics.median(between), statistics.mean(between)
    if device.type == "cpu":
        return Steady(wall, mean, wall)
    host = statistics.median(host_seconds(run, device) for _ in range(repeats.timed))
    return Steady(wall, mean, host)


def has_profiler(device: torch.device) -> bool:
    """Whether the profiler can measure kernels on this device."""
    return device.type == "cuda"


def profile_steady(run: Run, device: torch.device, repeats: Repeats) -> Kernels:
    """The kernels of `run` on a GPU."""
    for _ in range(repeats.warm_up):
        run()

    def in_a_row() -> None:
        for _ in range(PROFILED):
            run()

    return summarise(profiled_kernels(in_a_row, device), PROFILED)


def summarise(kernels: Sequence[KernelRun], iterations: int) -> Kernels:
    """Averages over iterations."""
    busy = union_seconds((kernel.start, kernel.start + kernel.seconds) for kernel in kernels)
    return Kernels(
        count=len(kernels) / iterations,
        seconds=sum(kernel.seconds for kernel in kernels) / iterations,
        attention_seconds=sum(k.seconds for k in kernels if k.is_attention) / iterations,
        busy_seconds=busy / iterations,
    )


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals lasts: (0, 2), (1, 3) and (5, 6) last 4."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
