"""A small Llama-style decoder that runs in fp64; soak runs and tests train it.

Attention is a callable, `attend(q, kv) -> out`: `partial(attention, step)`, or any other.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, rms_norm, silu

from dyncp import AttentionShape

# q [tokens, q_heads, head_dim], kv [tokens, 2, kv_heads, head_dim] -> out like q
Attend = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, shape: AttentionShape, hidden: int, ffn: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        widths = {"q": (hidden, q), "k": (hidden, kv), "v": (hidden, kv), "out": (q, hidden)}
        widths |= {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
        self.parts = nn.ModuleDict({name: nn.Linear(*w, bias=False) for name, w in widths.items()})

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        y = rms_norm(x, x.shape[-1:])
        q, k, v = (self.parts[name](y).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        kv = torch.stack([rotate(k, positions), v], dim=1)
        x = x + self.parts["out"](attend(rotate(q, positions), kv).flatten(1))
        y = rms_norm(x, x.shape[-1:])
        result: Tensor = x + self.parts["down"](silu(self.parts["gate"](y)) * self.parts["up"](y))
        return result


class Decoder(nn.Module):
    """The embedding is also the output matrix."""

    def __init__(self, shape: AttentionShape, layers: int, hidden: int, ffn: int, vocab: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(shape, hidden, ffn) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, local_data: Mapping[str, Tensor], attend: Attend) -> Tensor:
        """Logits [tokens, vocab] of this rank's tokens, also if it has none."""
        x, positions = self.embedding(local_data["input_ids"][0]), local_data["position_ids"][0]
        for layer in self.layers:
            x = layer(x, positions, attend)
        return linear(rms_norm(x, x.shape[-1:]), self.embedding.weight)


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """RoPE: turns the pairs (i, i + head_dim / 2) of [tokens, heads, head_dim]. Angles are fp64, so
    that a token gets the same bits on every rank."""
    x, y = heads.chunk(2, dim=-1)
    exponent = torch.arange(x.shape[-1], device=x.device).double() / x.shape[-1]
    angles = positions.double()[:, None, None] * 10_000.0**-exponent
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([x * cos - y * sin, x * sin + y * cos], dim=-1)


def token_losses(logits: Tensor, local_data: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of every local token with its target; 0 for tokens without a target."""
    return cross_entropy(logits, local_data["shift_labels"].flatten(), reduction="none")
