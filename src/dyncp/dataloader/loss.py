"""Targets, losses and gradients under context parallelism.

A rank's loss is the sum over its own targets divided by `num_items_in_batch`, the targets of the
whole optimiser step. The loss of the step is the sum over ranks, and so are the gradients.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dyncp.dataloader.sample_format import NO_TARGET
from dyncp.masks import Mask

LISTED = ("target_rows", "target_labels", "target_weights", "target_tokens")


class Targets(NamedTuple):
    """All targets of a sequence: the token that predicts, the token that is predicted, its label,
    and how often it counts."""

    token: Tensor
    target: Tensor
    label: Tensor
    weight: Tensor


def all_targets(labels: Tensor, mask: Mask) -> Targets:
    """Targets of all tokens, with one or several, in the order of tokens."""
    single = mask.resolved_targets()
    token = np.flatnonzero(single >= 0)
    target = single[token]
    if mask.branches is not None:
        token = np.concatenate([token, mask.branches[:, 0]])
        target = np.concatenate([target, mask.branches[:, 1]])
        order = np.argsort(token, kind="stable")
        token, target = token[order], target[order]
    weight = np.ones(len(token), np.int64) if mask.weights is None else mask.weights[target]
    found = [torch.from_numpy(np.array(x, np.int64)) for x in (token, target, weight)]
    label = labels[found[1]]
    trained = label != NO_TARGET
    predicting, predicted, counted = (x[trained] for x in found)
    return Targets(predicting, predicted, label[trained], counted)


def has_listed_targets(mask: Mask) -> bool:
    """Whether one label per token is not enough to say what is trained."""
    return mask.branches is not None or mask.weights is not None


def next_token_loss(logits: Tensor, local_data: Mapping[str, Tensor]) -> Tensor:
    """This rank's share of the loss: summed over ranks it is the mean over all targets of the
    optimiser step, by their weights.

    `logits` are [..., rows, vocabulary]; 16-bit ones are converted to fp32. Tokens with
    several targets (`masks.prefix_tree`) train on each of them.
    """
    rows = logits.flatten(0, -2)
    wide = torch.promote_types(rows.dtype, torch.float32)
    if "target_rows" in local_data:
        row, label, weight = (local_data[name].flatten() for name in LISTED[:3])
        losses = cross_entropy(rows[row].to(wide), label, reduction="none") * weight
    else:
        label = local_data["shift_labels"].flatten()
        losses = cross_entropy(rows.to(wide), label, reduction="none")
    return losses.sum() / local_data["num_items_in_batch"]


def undo_gradient_average(loss: Tensor, group: Any = None) -> Tensor:
    """The loss to call backward on if a wrapper (DDP, FSDP) averages gradients over `group`.

    Averaging divides the sum over ranks by their number; this multiplies by it beforehand. Without
    an initialised process group it returns the loss itself.
    """
    return loss * dist.get_world_size(group) if dist.is_initialized() else loss


def sum_over_ranks(tensor: Tensor, group: Any = None) -> Tensor:
    """Replaces the tensor by its sum over `group` (default: the world), and returns it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_gradients(model: nn.Module, group: Any = None) -> None:
    """Replaces all gradients by their sums over `group`, in one all-reduce per dtype.

    A parameter that this rank did not use, such as an expert that none of its tokens chose, gets
    the other ranks' sum; one that no rank used stays without a gradient.
    """
    if not dist.is_initialized():
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_kind[parameter.dtype, parameter.device].append(parameter)
    for parameters in by_kind.values():
        _sum_gradients_of(parameters, group)


def _sum_gradients_of(parameters: list[nn.Parameter], group: Any) -> None:
    """The number of ranks that used each parameter is summed in the same message."""
    used = parameters[0].new_tensor([float(p.grad is not None) for p in parameters])
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([used, *(gradient.flatten() for gradient in gradients)])
    total = sum_over_ranks(flat.detach(), group)
    users, *sums = torch.split(total, [len(parameters), *(p.numel() for p in parameters)])
    for parameter, num_users, gradient in zip(parameters, users.tolist(), sums, strict=True):
        if parameter.grad is not None:
            parameter.grad.copy_(gradient.view_as(parameter))
        elif num_users:
            parameter.grad = gradient.view_as(parameter).clone()
