"""Losses and gradients under context parallelism.

A rank's loss is the sum over its own targets divided by `num_items_in_batch`, the targets of the
whole optimiser step. The loss of the step is the sum over ranks, and so are the gradients.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def undo_gradient_average(loss: Tensor, group: Any = None) -> Tensor:
    """The loss to call backward on where a wrapper (DDP, FSDP) averages gradients over `group`.

    Averaging divides the sum over ranks by their number; this multiplies by it beforehand. Without
    an initialised process group it is the loss itself.
    """
    return loss * dist.get_world_size(group) if dist.is_initialized() else loss


def sum_over_ranks(tensor: Tensor, group: Any = None) -> Tensor:
    """Replaces the tensor by its sum over `group` (default: the world); gives it back."""
    if dist.is_initialized():
        dist.all_reduce(tensor, group=group)
    return tensor


def sum_gradients(model: nn.Module, group: Any = None) -> None:
    """Replaces all gradients by their sums over `group`, in one message per dtype.

    A parameter that this rank did not use, such as an expert that none of its tokens chose, gets
    what the other ranks have; one that no rank used stays without a gradient.
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
    """The sums travel with the number of ranks that used each parameter."""
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
