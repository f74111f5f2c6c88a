"""Sums of losses and gradients over all ranks that have different tokens.

Every rank divides its loss by the targets of the whole optimiser step (`num_items_in_batch`), so
the loss and the gradients of the step are the sums over ranks, not their averages."""

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dyncp.dataloader.ranks import data_dimensions

# An attribute of gradients that `sum_gradients` has summed: the tensor's version at that time. It
# is stored on the gradient itself because it must disappear with it.
SUMMED = "dyncp_summed"


def _groups(group: Any) -> list[Any]:
    """The process groups along which ranks have different tokens, one for each dimension of a mesh.
    Summing over each of them in sequence gives the sum over all ranks."""
    if not dist.is_initialized():
        return []
    if not hasattr(group, "get_group"):
        return [group or dist.group.WORLD]
    if group.ndim == 1:
        return [group.get_group()]
    names = data_dimensions(group)
    if not names:
        raise ValueError(
            f"mesh has dimensions {list(group.mesh_dim_names or ())}; name the dimensions along "
            "which ranks have different tokens 'dp...' and 'cp', or pass a group"
        )
    return [group.get_group(name) for name in names]


def undo_gradient_average(loss: Tensor, group: Any = None) -> Tensor:
    """Multiplies the loss by the number of ranks in `group`. Call backward on the result if a
    wrapper (DDP, FSDP) averages gradients over the group: the average is then the sum.

    `group` is a process group (default: the world), or a DeviceMesh, of which the dimensions named
    dp... and cp are used. Without an initialised process group, the loss is returned unchanged.
    """
    ranks = math.prod(dist.get_world_size(one) for one in _groups(group))
    return loss * ranks if ranks > 1 else loss


def sum_over_ranks(tensor: Tensor, group: Any = None) -> Tensor:
    """Sums the tensor over `group` (see `undo_gradient_average`) in place, and returns it."""
    for one in _groups(group):
        dist.all_reduce(tensor, group=one)
    return tensor


def sum_gradients(model: nn.Module, group: Any = None) -> None:
    """Replaces all gradients by their sums over `group` (see `undo_gradient_average`), with one
    all-reduce per dtype and device.

    A parameter that this rank did not use, such as an expert that none of its tokens chose, gets
    the sum of the other ranks. A parameter that no rank used stays without a gradient. If tensor
    parallelism shards a parameter, ranks sum their shards. Call this once per optimiser step, after
    the last micro-batch: a second call would multiply the sums by the number of ranks.
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
                f"parameter {name} is sharded over ranks {shared}, so its gradients cannot be "
                "summed over them. If FSDP shards it, FSDP sums its gradients: do not call "
                "sum_gradients. If tensor parallelism does, pass the mesh, or the group of 'cp', "
                "to sum_gradients"
            )


def _check_fresh(model: nn.Module, group: Any) -> None:
    """Raises unless some gradient has been reset and computed again since it was summed: either it
    is a new tensor, or its version has grown by two, by zeroing in place and by backward."""
    if all(dist.get_world_size(one) == 1 for one in _groups(group)):
        return
    found = [p.grad for p in model.parameters() if p.grad is not None]
    changes = [grad._version - getattr(grad, SUMMED, -2) for grad in found]
    if found and max(changes) <= 1:
        raise ValueError(
            "these gradients contain sums over ranks from an earlier call and would be summed "
            "twice: call sum_gradients once per optimiser step, after the last micro-batch, and "
            "optimizer.zero_grad() before the next step"
        )


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor itself."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


def _sum_gradients_of(parameters: list[nn.Parameter], group: Any) -> None:
    """Sums gradients of one dtype and device. The same all-reduce counts the ranks that used each
    parameter."""
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
