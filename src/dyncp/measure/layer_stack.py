"""A stack of transformer layers, without embedding and logits; attention is handed in.

Layers are Llama's: RMSNorm, projections, rotary positions, attention, RMSNorm, MLP. Everything but
attention treats every token by itself, so a rank runs them on the rows that it has.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm, silu

from dyncp.cost import ModelConfig
from dyncp.measure.implementation import Attend

NORM_EPS, ROPE_THETA, WEIGHT_STD = 1e-5, 500_000.0, 0.02


class Rotation(NamedTuple):
    """Cosines, and sines that have a minus in the first half: [tokens, 1, head dim] each."""

    cos: Tensor
    sin: Tensor


def rotation_of(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """The rotation of tokens at these positions; computed in fp64."""
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; rotary positions need an even one")
    exponent = torch.arange(0, head_dim, 2, device=positions.device).double() / head_dim
    angles = positions.double()[:, None, None] * ROPE_THETA**-exponent
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype))


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turns the pairs (i, i + head dim / 2) of every head of [tokens, heads, head dim]."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * rotation.cos, swapped, rotation.sin)


class LayerStack(nn.Module):
    """`layers` layers with the sizes of `model`, weights drawn at random."""

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
    """In place of attention: the output is q, without a launch. Gradients of k and v are those of
    the first heads, so that all weights get theirs."""
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
