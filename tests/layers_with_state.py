"""Layers that need contiguous sequences, in plain torch, and the texts that a batch stands for."""

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from dyncp.masks import Mask

WIDTH, KERNEL = 6, 4


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """A causal depthwise convolution of one document [tokens, width]."""
    kernel = weight.shape[-1]
    return conv1d(pad(x.T, (kernel - 1, 0))[None], weight[:, None], groups=len(weight))[0].T


def linear_attention(x: Tensor, weight: Tensor) -> Tensor:
    """A gated recurrence over one document [tokens, width]; `weight` is [width, 3 * width + 1]."""
    q, k, v, gate = (x @ weight).split([x.shape[1]] * 3 + [1], dim=1)
    state, out = x.new_zeros(x.shape[1], x.shape[1]), []
    for t in range(len(x)):
        state = gate[t].sigmoid() * state + torch.outer(k[t], v[t])
        out.append(q[t] @ state)
    return torch.stack(out)


def texts_of(mask: Mask) -> list[list[int]]:
    """For every token, all tokens of its text up to it, found by following the mask back: the one
    before is the nearest attended one with the position before."""
    positions, allowed = mask.resolved_positions(), mask.dense()
    texts: list[list[int]] = []
    for token in range(mask.length):
        found = [k for k in range(token) if allowed[token, k]]
        found = [k for k in found if positions[k] == positions[token] - 1][-1:]
        texts.append([*(texts[found[0]] if found else []), token])
    return texts


def one_by_one(layer, x: Tensor, masks: list[Mask]) -> Tensor:
    """The layer's result for every token, from its own text alone."""
    offset, rows = 0, []
    for mask in masks:
        for text in texts_of(mask):
            rows.append(layer(x[offset + torch.tensor(text)])[-1])
        offset += mask.length
    return torch.stack(rows)
