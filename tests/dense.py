"""Dense attention in one process: what every plan's result is compared with."""

import torch
from torch import Tensor

from dyncp import Batch


def dense_attention(
    batch: Batch,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of a whole batch, tokens in batch order, computed in the inputs' dtype."""
    repeat = q.shape[1] // k.shape[1]
    out = []
    for index, mask in enumerate(batch.masks[name]):
        rows = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        keys, values = (x[rows].repeat_interleave(repeat, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        allowed = torch.from_numpy(mask.dense()).to(q.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sink is not None:
            column = sink.to(q.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, column], dim=-1)
        empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
        out.append(torch.einsum("hqk,khd->qhd", weights[..., : len(keys)], values))
    return torch.cat(out)


def relative_error(given: Tensor, expected: Tensor) -> float:
    """Largest absolute error over largest absolute value."""
    error = (given.double() - expected.double()).abs().max().item() if given.numel() else 0.0
    size = expected.abs().max().item() if expected.numel() else 0.0
    return error / size if size else error
