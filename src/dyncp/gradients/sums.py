"""Sums of losses and gradients over all ranks that have different tokens.

Every rank divides its loss by the targets of the whole optimiser step (`num_items_in_batch`), so
the loss and the gradients of the step are the sums over ranks, not their averages.

`sum_gradients` is right whatever has happened to the gradients before:

    nothing          they are summed
    DDP              has averaged them over some ranks, which now have equal gradients; the sum over
                     these ranks undoes the average
    FSDP2, HSDP      have summed shards over some ranks and divided them by a number that is known;
                     they are multiplied by it, and summed over the other ranks
    tensor parallel  ranks sum their shards
"""

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dyncp.gradients.events import LISTENERS, watch_loss
from dyncp.gradients.sharded import Sharded, sharded_parameters
from dyncp.topology import data_dimensions

# An attribute of gradients that `sum_gradients` has summed: the tensor's version at that time. It
# is stored on the gradient itself because it must disappear with it.
SUMMED = "dyncp_summed"


def data_groups(group: Any) -> list[Any]:
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


def times_ranks(loss: Tensor, group: Any = None) -> Tensor:
    """Multiplies the loss by the number of ranks in `group`, for frameworks that average gradients
    over these ranks and then clip them, before `sum_gradients` could be called."""
    ranks = math.prod(dist.get_world_size(one) for one in data_groups(group))
    return watch_loss(loss) * ranks if ranks > 1 else loss


def sum_over_ranks(tensor: Tensor, group: Any = None) -> Tensor:
    """Sums the tensor in place over the ranks with different tokens, and returns it. `group` is a
    process group (default: the world), or a DeviceMesh, of which the dimensions named dp... and cp
    are used. Without an initialised process group, the tensor is returned unchanged."""
    for one in data_groups(group):
        dist.all_reduce(tensor, group=one)
    return tensor


def sum_gradients(model: nn.Module, group: Any = None) -> None:
    """Makes all gradients the sums over the ranks with different tokens (`group` as in
    `sum_over_ranks`), whether or not DDP or FSDP2 has averaged them before.

    Call this once per optimiser step, after the last micro-batch and before gradients are clipped
    or their norm is taken: a second call would multiply the sums by the number of ranks. A
    parameter that this rank did not use, such as an expert that none of its tokens chose, gets the
    sum of the other ranks. A parameter that no rank used stays without a gradient. If tensor
    parallelism shards a parameter, ranks sum their shards.
    """
    groups = data_groups(group)
    if not groups:
        return
    _check_fresh(model, groups)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), whose gradients "
            "sum_gradients cannot tell; use fully_shard (FSDP2)"
        )
    sharded = sharded_parameters(model.modules())
    alike: dict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            left, factor = _left_to_do(name, parameter, sharded.get(id(parameter)), groups)
            alike[parameter.dtype, parameter.device, left, factor].append(parameter)
    for (_, _, left, factor), parameters in alike.items():
        if left:
            _sum_gradients_of(parameters, [groups[number] for number in left])
        for gradient in [p.grad for p in parameters if p.grad is not None]:
            if factor != 1:
                local_part(gradient).mul_(factor)
            setattr(gradient, SUMMED, version_of(gradient))
    for listener in list(LISTENERS):
        listener.summed(model)


def _left_to_do(
    name: str, parameter: nn.Parameter, sharded: Sharded | None, groups: list[Any]
) -> tuple[tuple[int, ...], float]:
    """Over which groups (by number) a gradient is yet to be summed, and the factor after that."""
    mesh: Any = getattr(parameter, "device_mesh", None)  # of a DTensor
    if sharded is None:
        ranks = set() if mesh is None else set(mesh.mesh.flatten().tolist())
        hint = "pass the mesh, or the group of 'cp', to sum_gradients"
    else:
        ranks = set(sharded.ranks)
        hint = "FSDP must span whole dimensions of the mesh; pass the mesh to sum_gradients"
    left, covered = [], 1
    for number, one in enumerate(groups):
        members = set(dist.get_process_group_ranks(one))
        if sharded is not None and members <= ranks:
            covered *= len(members)
        elif len(members & ranks) > 1:
            raise ValueError(
                f"parameter {name} is sharded over ranks {sorted(members & ranks)}, so its "
                f"gradients cannot be summed over ranks {sorted(members)}: {hint}"
            )
        else:
            left.append(number)
    if sharded is not None and sharded.waits:
        raise ValueError(
            f"FSDP has not reduced the gradients of {name}: call "
            "model.set_requires_gradient_sync(True) before the last micro-batch of a step"
        )
    factor = 1.0 if sharded is None else sharded.divisor * covered / len(ranks)
    return tuple(left), factor


def _check_fresh(model: nn.Module, groups: list[Any]) -> None:
    """Raises unless some gradient has been reset and computed again since it was summed: either it
    is a new tensor, or its version has grown by two, by zeroing in place and by backward (by one if
    it is a DTensor: zeroing does not count there)."""
    if all(dist.get_world_size(one) == 1 for one in groups):
        return
    found = [p.grad for p in model.parameters() if p.grad is not None]
    changes = [
        version_of(grad) - getattr(grad, SUMMED, -2) + (local_part(grad) is not grad)
        for grad in found
    ]
    if found and max(changes) <= 1:
        raise ValueError(
            "these gradients contain sums over ranks from an earlier call and would be summed "
            "twice: call sum_gradients once per optimiser step, after the last micro-batch, and "
            "optimizer.zero_grad() before the next step"
        )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor itself."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


def version_of(gradient: Tensor) -> int:
    """Grows with every change in place. Changes of a DTensor and of its shard count separately."""
    part = local_part(gradient)
    return gradient._version + (part._version if part is not gradient else 0)


def _sum_gradients_of(parameters: list[nn.Parameter], groups: list[Any]) -> None:
    """Sums gradients of one dtype and device. The same all-reduce counts the ranks that used each
    parameter."""
    used = [float(p.grad is not None) for p in parameters]
    gradients = [local_part(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters]
    flat = torch.cat([gradients[0].new_tensor(used), *(x.flatten() for x in gradients)]).detach()
    for one in groups:
        dist.all_reduce(flat, group=one)
    users, *sums = torch.split(flat, [len(used), *(x.numel() for x in gradients)])
    for parameter, num_users, gradient, summed in zip(
        parameters, users.tolist(), gradients, sums, strict=True
    ):
        if parameter.grad is not None:
            gradient.copy_(summed.view_as(gradient))
        elif num_users:
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(summed.view_as(gradient))
