"""Random inputs of an attention layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.blocks import AttentionShape

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


# Hosts take seconds for tens of millions of random numbers: larger inputs repeat these rows.
DRAWN_ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """q, dout: [tokens, q heads, dim]; k, v: [tokens, kv heads, dim]. q, k, v require gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def rows(self, rows: Tensor) -> "Inputs":
        """The inputs of some tokens."""
        q, k, v = (x.detach()[rows].requires_grad_() for x in self.qkv)
        return Inputs(q, k, v, self.dout[rows])


def make_inputs(
    tokens: int, shape: AttentionShape, device: torch.device | str, seed: int = 0
) -> Inputs:
    """Normally distributed; the same on every device for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        rows = min(tokens, DRAWN_ROWS)
        drawn = torch.randn(rows, heads * shape.head_dim, generator=generator)
        drawn = _rolled(drawn.to(device, DTYPES[shape.dtype]), tokens)
        return drawn.view(tokens, heads, shape.head_dim)

    q, k, v, dout = (
        draw(heads) for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
    )
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def _rolled(drawn: Tensor, tokens: int) -> Tensor:
    """More rows: every repetition is rolled by one number more, so that no two rows are equal."""
    if len(drawn) == tokens:
        return drawn
    pieces = [drawn.roll(i, dims=-1) for i in range(-(-tokens // len(drawn)))]
    return torch.cat(pieces)[:tokens]
