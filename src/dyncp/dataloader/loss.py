"""Losses and gradients under context parallelism.

A rank's loss is the sum over its own targets divided by `num_items_in_batch`, the targets of the
whole optimiser step. The loss of the step is the sum over ranks, and so are the gradients.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dyncp.dataloader.local_fields import LISTED
from dyncp.dataloader.ranks import data_dimensions

SUMMED = "dyncp_summed"  # of a gradient: its version when it was summed


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


def _groups(group: Any) -> list[Any]:
    """The process groups over which ranks have different tokens, one for each dimension of a mesh.
    Sums over one after the other are sums over all of them."""
    if not dist.is_initialized():
        return []
    if not hasattr(group, "get_group"):
        return [group or dist.group.WORLD]
    if group.ndim == 1:
        return [group.get_group()]
    names = data_dimensions(group)
    if not names:
        raise ValueError(
            f"mesh has dimensions {list(group.mesh_dim_names or ())}; name those of ranks with "
            "different tokens dp... and 'cp', or pass a group"
        )
    return [group.get_group(name) for name in names]


def undo_gradient_average(loss: Tensor, group: Any = None) -> Tensor:
    """The loss to call backward on if a wrapper (DDP, FSDP) averages gradients over `group`: a
    process group (default: the world), or a DeviceMesh, of which dimensions dp... and cp count.

    Averaging divides the sum over ranks by their number; this multiplies by it beforehand. Without
    an initialised process group it returns the loss itself.
    """
    ranks = math.prod(dist.get_world_size(one) for one in _groups(group))
    return loss * ranks if ranks > 1 else loss


def sum_over_ranks(tensor: Tensor, group: Any = None) -> Tensor:
    """Replaces the tensor by its sum over `group` (see `undo_gradient_average`); returns it."""
    for one in _groups(group):
        dist.all_reduce(tensor, group=one)
    return tensor


def sum_gradients(model: nn.Module, group: Any = None) -> None:
    """Replaces all gradients by their sums over `group` (see `undo_gradient_average`), in one
    all-reduce per dtype.

    A parameter that this rank did not use, such as an expert that none of its tokens chose, gets
    the other ranks' sum; one that no rank used stays without a gradient. Of parameters that tensor
    parallelism divides, ranks sum their shares. Call it once per optimiser step, after the last
    micro-batch: sums that are summed again count as often as there are ranks.
    """
    _check_fresh(model, group)
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _check_not_summed(name, parameter, group)
            by_kind[parameter.dtype, parameter.device].append(parameter)
    for parameters in by_kind.values():
        _sum_gradients_of(parameters, group)


def _check_not_summed(name: str, parameter: nn.Parameter, group: Any) -> None:
    mesh: Any = getattr(parameter, "device_mesh", None)  # of a DTensor
    if mesh is None:
        return
    for one in _groups(group):
        ranks = set(dist.get_process_group_ranks(one))
        shared = sorted(ranks.intersection(mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise ValueError(
                f"ranks {shared} share parameter {name}, and its gradients were to be summed over "
                "them. If FSDP shares it, that has happened already: leave sum_gradients out. If "
                "tensor parallelism does, give sum_gradients the mesh, or the group of 'cp'"
            )


def _check_fresh(model: nn.Module, group: Any) -> None:
    """Gradients that were set to zero in place since their last sum have changed twice, by that and
    by a backward; others are new tensors."""
    if all(dist.get_world_size(one) == 1 for one in _groups(group)):
        return
    found = [p.grad for p in model.parameters() if p.grad is not None]
    changes = [grad._version - getattr(grad, SUMMED, -2) for grad in found]
    if found and max(changes) <= 1:
        raise ValueError(
            "gradients were summed over ranks before, and are still in what would be summed now: "
            "call sum_gradients once per optimiser step, after the last micro-batch, and "
            "optimizer.zero_grad() before the next one"
        )


def _local(tensor: Tensor) -> Tensor:
    """This rank's share of a DTensor."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


def _sum_gradients_of(parameters: list[nn.Parameter], group: Any) -> None:
    """The number of ranks that used each parameter is summed in the same message."""
    used = [float(p.grad is not None) for p in parameters]
    gradients = [_local(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters]
    flat = torch.cat([gradients[0].new_tensor(used), *(x.flatten() for x in gradients)])
    total = sum_over_ranks(flat.detach(), group)
    users, *sums = torch.split(total, [len(used), *(x.numel() for x in gradients)])
    for parameter, num_users, gradient, summed in zip(
        parameters, users.tolist(), gradients, sums, strict=True
    ):
        if parameter.grad is not None:
            gradient.copy_(summed.view_as(gradient))
        elif num_users:
            parameter.grad = torch.zeros_like(parameter)
            _local(parameter.grad).copy_(summed.view_as(gradient))
        if parameter.grad is not None:
            setattr(parameter.grad, SUMMED, parameter.grad._version)
