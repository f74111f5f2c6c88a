"""Attention of the one-process run: torch's own, document by document, no executor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dyncp.masks import Mask, causal

ROWS = 1024  # query rows per piece of a masked document, so that keys after them are not computed


@dataclass(frozen=True, eq=False)
class Piece:
    """Query rows that attend the keys before `keys`. Without a bias they are causal."""

    rows: slice
    keys: int
    bias: Tensor | None = None  # [rows, keys]: 0 or -inf
    empty: Tensor | None = None  # [rows, 1, 1]: whether the row attends nothing


class DenseAttention:
    """`attend(q, kv)` for whole documents that follow one another, with one mask each.

    Masks other than causal become biases that all layers share: 4 bytes per pair of tokens in fp32,
    at most 1 GiB for a document of 16,384 tokens.
    """

    def __init__(
        self,
        masks: Sequence[Mask],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lengths = [mask.length for mask in masks]
        self._pieces = [list(_cut(mask, dtype, device)) for mask in masks]

    def __call__(self, q: Tensor, kv: Tensor) -> Tensor:
        queries, keys = torch.split(q, self.lengths), torch.split(kv, self.lengths)
        documents = zip(queries, keys, self._pieces, strict=True)
        return torch.cat([_attend(q, kv, piece) for q, kv, pieces in documents for piece in pieces])


def _cut(mask: Mask, dtype: torch.dtype, device: torch.device | str) -> Iterator[Piece]:
    if np.array_equal(mask.ranges, causal(mask.length).ranges):
        yield Piece(slice(0, mask.length), mask.length)
        return
    for first in range(0, mask.length, ROWS):
        ranges = torch.from_numpy(mask.ranges[first : first + ROWS].astype(np.int64))
        starts, ends = ranges[..., :1], ranges[..., 1:]
        keys = torch.arange(max(1, int((ends * (ends > starts)).max())))
        allowed = ((keys >= starts) & (keys < ends)).any(dim=1)
        empty = ~allowed.any(dim=1, keepdim=True)
        bias = torch.zeros(allowed.shape, dtype=dtype)
        bias.masked_fill_(~(allowed | empty), -torch.inf)  # an empty row would be NaN
        rows = slice(first, first + len(ranges))
        yield Piece(rows, len(keys), bias.to(device), empty.unsqueeze(-1).to(device))


def _attend(q: Tensor, kv: Tensor, piece: Piece) -> Tensor:
    """Attention of one piece; rows that attend nothing give 0."""
    k, v = kv[: piece.keys].unbind(1)
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[piece.rows], k, v))
    out = scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=piece.bias,
        is_causal=piece.bias is None,
        enable_gqa=True,
    )
    out = out.squeeze(0).transpose(0, 1)
    return out if piece.empty is None else out.masked_fill(piece.empty, 0.0)
