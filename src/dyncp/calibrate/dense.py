"""Dense attention with gradients in fp64, a few query rows at a time: the expected results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.blocks import DEFAULT_MASK, Batch
from dyncp.calibrate.calls import Attend, Inputs
from dyncp.masks import Mask

# Scores of one chunk of rows, over all heads: 512 MiB in fp64.
CHUNK_SCORES = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """Output and gradients, rows as in the inputs."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def named(self) -> dict[str, Tensor]:
        return {"out": self.out, "dq": self.dq, "dk": self.dk, "dv": self.dv}


def results_of(attend: Attend, inputs: Inputs) -> Results:
    """Output and gradients of one call."""
    out = attend(*inputs.qkv)
    return Results(out.detach(), *torch.autograd.grad(out, inputs.qkv, inputs.dout))


def relative_errors(given: Results, expected: Results) -> dict[str, float]:
    """‖given − expected‖ / ‖expected‖ of output and gradients."""
    errors = {}
    for name, wanted in expected.named().items():
        size = wanted.norm().item()
        error = (given.named()[name].double() - wanted).norm().item()
        errors[name] = error / size if size else error
    return errors


def dense_attention(batch: Batch, inputs: Inputs) -> Results:
    """Attention of all sequences, tokens in batch order, in fp64."""
    q, k, v, dout = (x.detach().double() for x in (*inputs.qkv, inputs.dout))
    found = Results(*(torch.zeros_like(x) for x in (q, q, k, v)))
    for index, mask in enumerate(batch.masks[DEFAULT_MASK]):
        rows = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        parts = Results(*(x[rows] for x in found.named().values()))
        _attend(mask, q[rows], k[rows], v[rows], dout[rows], parts)
    return found


def _attend(mask: Mask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, found: Results) -> None:
    ranges = torch.from_numpy(mask.ranges.copy()).to(q.device)
    chunk = max(1, CHUNK_SCORES // (q.shape[1] * len(k)))
    for first in range(0, len(q), chunk):
        rows = slice(first, first + chunk)
        _attend_rows(ranges[rows], rows, q, k, v, dout, found)


def _attend_rows(
    ranges: Tensor, rows: slice, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, found: Results
) -> None:
    heads = k.shape[1]
    scale = q.shape[2] ** -0.5
    groups = (-1, heads, q.shape[1] // heads, q.shape[2])
    queries, gradient = q[rows].view(groups), dout[rows].view(groups)
    scores = torch.einsum("qhgd,khd->hgqk", queries, k) * scale
    key = torch.arange(len(k), device=q.device)
    allowed = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(dim=1)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    out = torch.einsum("hgqk,khd->qhgd", weights, v)
    found.out[rows] = out.flatten(1, 2)
    found.dv.add_(torch.einsum("hgqk,qhgd->khd", weights, gradient))
    delta = (out * gradient).sum(dim=-1).permute(1, 2, 0).unsqueeze(-1)
    dscores = weights * (torch.einsum("qhgd,khd->hgqk", gradient, v) - delta) * scale
    found.dq[rows] = torch.einsum("hgqk,khd->qhgd", dscores, k).flatten(1, 2)
    found.dk.add_(torch.einsum("hgqk,qhgd->khd", dscores, queries))
