"""Merging partial attention results."""

import torch
from torch import Tensor


def merge_partial(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges a partial result into `out` [rows, heads, dim] and `lse` [rows, heads] in place.

    Each partial output is a softmax over its own keys; its share of the whole is
    exp(its log-sum-exp − the joint one). A side that attended nothing has log-sum-exp −∞ and
    share 0, also when both have.
    """
    total = torch.logaddexp(lse, new_lse)
    old_share, new_share = (_share(side, total) for side in (lse, new_lse))
    out.mul_(old_share.unsqueeze(-1)).add_(new_out * new_share.unsqueeze(-1))
    lse.copy_(total)


def _share(lse: Tensor, total: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
