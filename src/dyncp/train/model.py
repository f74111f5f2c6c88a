"""A Llama-style decoder for `DCPDataLoader`'s local data: the example of a model under dyncp.

A rank holds some tokens of some documents. All layers but attention treat every token by itself, so
they need not know. Attention is a callable, `attend(q, kv) -> out`:

    step = executor.prepare(plan)
    logits = decoder(local_data, partial(attention, step))

RoPE takes the positions from the data, because a token's row on this rank is not its position.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, silu

from dyncp.train.config import DecoderConfig

# q [tokens, q_heads, head_dim], kv [tokens, 2, kv_heads, head_dim] -> out like q
Attend = Callable[[Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]  # cosines and sines, [tokens, 1, head_dim / 2] each


class Decoder(nn.Module):
    """Embedding, layers, norm and logits; the embedding is also the output matrix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, local_data: Mapping[str, Tensor], attend: Attend) -> Tensor:
        """Logits [tokens, vocab] of this rank's tokens, also if it has none."""
        x = self.embedding(local_data["input_ids"].flatten())
        positions = local_data["position_ids"].flatten()
        rotation = rope_rotation(positions, self.config, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, attend)
        return linear(self.norm(x), self.embedding.weight)


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, attend)
        result: Tensor = x + self.ffn(self.ffn_norm(x))
        return result


class Attention(nn.Module):
    """Grouped-query attention. Everything before and after `attend` is per token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_width, kv_width = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        self.to_q = nn.Linear(config.hidden, q_width, bias=False)
        self.to_k = nn.Linear(config.hidden, kv_width, bias=False)
        self.to_v = nn.Linear(config.hidden, kv_width, bias=False)
        self.to_out = nn.Linear(q_width, config.hidden, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.to_q, self.to_k, self.to_v)
        )
        kv = torch.stack([rotate(k, rotation), v], dim=1)
        out = attend(rotate(q, rotation), kv)
        result: Tensor = self.to_out(out.flatten(1))
        return result


class SwiGLU(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return result


def rope_rotation(positions: Tensor, config: DecoderConfig, dtype: torch.dtype) -> Rotation:
    """The rotation of every token, computed in fp64: a token gets the same bits on every rank."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    angles = positions.double()[:, None, None] * config.rope_theta ** -exponent.double()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Turns the pairs (i, i + head_dim / 2) of every head of [tokens, heads, head_dim]."""
    (cos, sin), (x, y) = rotation, heads.chunk(2, dim=-1)
    return torch.cat([x * cos - y * sin, x * sin + y * cos], dim=-1)


def token_losses(logits: Tensor, local_data: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of every local token with its target, 0 where it has none."""
    return cross_entropy(logits, local_data["shift_labels"].flatten(), reduction="none")
