"""Attention of a few query rows over listed key rows, in plain fp64."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.kernels.merge import merge_partial


@dataclass(frozen=True)
class RowTile:
    """Neighbouring query rows with the key rows that they meet."""

    rows: slice
    columns: Tensor  # key rows
    allowed: Tensor  # bool [rows, columns]

    def parts(self, of_rows: Iterable[Tensor], of_columns: Iterable[Tensor]) -> Iterator["RowTile"]:
        """The tile, or its single rows where some of these tensors is not finite in it."""
        finite = all(x[self.rows].isfinite().all() for x in of_rows)
        if finite and all(x[self.columns].isfinite().all() for x in of_columns):
            yield self
        else:
            yield from self.single_rows()

    def single_rows(self) -> Iterator["RowTile"]:
        """Each row with the keys that it may see: a product of 0 with NaN, or with infinity, is
        NaN, so that others must not take part."""
        for index, allowed in enumerate(self.allowed):
            if allowed.any():
                row = self.rows.start + index
                yield RowTile(slice(row, row + 1), self.columns[allowed], allowed[allowed][None])


def attend_tile(
    tile: RowTile, inputs: tuple[Tensor, Tensor, Tensor], scale: float, out: Tensor, lse: Tensor
) -> None:
    """Merges the tile's attention into the rows of `out` and `lse`."""
    q, k, v = inputs
    scores = _scores(q[tile.rows], k[tile.columns], scale, tile.allowed)
    tile_lse = scores.logsumexp(dim=-1)
    weights = _weights(scores, tile_lse)
    values = torch.einsum("hqk,khd->qhd", weights, _per_q_head(v[tile.columns], q))
    merge_partial(out[tile.rows], lse[tile.rows], values.to(out.dtype), tile_lse.T.to(lse.dtype))


def attend_tile_backward(
    tile: RowTile,
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds the tile's gradients to `grads`: dq, dk, dv."""
    (q, k, v), (dq, dk, dv) = inputs, grads
    keys, values = _per_q_head(k[tile.columns], q), _per_q_head(v[tile.columns], q)
    queries, gradient = q[tile.rows].double(), dout[tile.rows].double()
    scores = _scores(q[tile.rows], k[tile.columns], scale, tile.allowed)
    weights = _weights(scores, lse[tile.rows].double().T)
    row_sum = delta[tile.rows].double().T.unsqueeze(-1)
    dweights = torch.einsum("qhd,khd->hqk", gradient, values)
    dscores = weights * (dweights - row_sum) * scale
    dq[tile.rows] += torch.einsum("hqk,khd->qhd", dscores, keys).to(dq.dtype)
    tile_dk = torch.einsum("hqk,qhd->khd", dscores, queries)
    tile_dv = torch.einsum("hqk,qhd->khd", weights, gradient)
    dk[tile.columns] += _per_kv_head(tile_dk, k).to(dk.dtype)
    dv[tile.columns] += _per_kv_head(tile_dv, v).to(dv.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """Masked scores [q heads, rows, columns]."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), _per_q_head(k, q)) * scale
    return scores.masked_fill(~allowed, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores − lse), and 0 in rows that attend nothing (lse −∞)."""
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))


def _per_q_head(kv: Tensor, q: Tensor) -> Tensor:
    """[rows, kv heads, dim] in fp64, each kv head repeated for the q heads it serves."""
    return kv.double().repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _per_kv_head(grad: Tensor, kv: Tensor) -> Tensor:
    """Sums the gradients of the q heads that share a kv head."""
    _, kv_heads, dim = kv.shape
    return grad.view(len(grad), kv_heads, -1, dim).sum(dim=2)
