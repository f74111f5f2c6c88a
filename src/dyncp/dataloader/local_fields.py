"""`local_data`: a rank's part of a batch as a dict of tensors, named as in Transformers.

input_ids, labels          [1, rows]    the sample's own labels, or its ids
shift_labels               [1, rows]    next-token targets (-100: none)
position_ids               [1, rows]    the sample's own, or the mask's
token_fields               one per row, in their own layout
sample_ids, sample_fields  which samples the rows are from; values of whole samples
target_rows, target_labels, target_weights, target_tokens
                           [1, targets], if tokens have several targets or weights
num_items_in_batch         []           targets of the optimiser step, on all ranks
batch_fingerprint          [2]          which batch it is

A rank's loss is the sum over its own targets divided by `num_items_in_batch`. The loss of the
optimiser step is the sum over ranks, and so are the gradients.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dyncp.arrays import Int64, starts_of
from dyncp.blocks import Batch
from dyncp.dataloader.options import PLAIN_FIELDS, TARGET_FIELDS
from dyncp.dataloader.ranks import data_dimensions
from dyncp.dataloader.reading import NO_TARGET, input_ids_of, labels_of, token_field
from dyncp.masks import Mask, positions_and_targets
from dyncp.masks.mask import normal_mask
from dyncp.plan import Plan, RankPlan

PADDING = {"labels": NO_TARGET, "shift_labels": NO_TARGET}  # other fields are padded with 0
SUMMED = "dyncp_summed"  # of a gradient: its version when it was summed
SampleOf = Callable[[int], Mapping[str, Any]]


def local_data(
    samples: Sequence[Mapping[str, Any]],
    batch: Batch,
    plan: RankPlan | Plan,
    *,
    token_fields: Mapping[str, int] | None = None,
    num_items_in_batch: int | None = None,
) -> dict[str, Tensor]:
    """This rank's tokens: `input_ids`, `position_ids`, `labels` and `shift_labels` as [1, rows].

    `shift_labels` are the next-token targets, shifted before the sequences are cut (-100: none).
    `num_items_in_batch` is the number of targets of the whole optimiser step (default: of this
    batch), at least 1; if masks weigh targets, the sum of their weights. If a local token has
    several targets, or weights, `target_rows`, `target_labels`, `target_weights` and
    `target_tokens` (places in the batch) [1, targets] list all targets of local rows, and tokens
    with several have none in `shift_labels`: `next_token_loss` takes either. `batch_fingerprint`
    says which batch it is. `token_fields` names further fields and the dimension that runs over
    their tokens: a [3, tokens] field with dimension 1 becomes [3, 1, rows], a [tokens, width] field
    with dimension 0 becomes [1, rows, width]. A sample's own `labels` and `position_ids` take
    precedence. For a whole Plan (virtual ranks) the rows of all ranks are concatenated.
    """
    if plan.fingerprint != batch.fingerprint:
        raise ValueError(
            f"the plan is for batch {plan.fingerprint}, but this is batch {batch.fingerprint}"
        )
    if len(samples) != len(batch.lengths):
        raise ValueError(
            f"got {len(samples)} samples; the batch has {len(batch.lengths)} sequences"
        )
    data = local_rows(
        plan,
        lambda number: samples[number],
        partial(_masks_of_sequence, batch),
        token_fields or {},
    )
    if num_items_in_batch is None:
        num_items_in_batch = count_targets(samples, batch)
    return data | {
        "num_items_in_batch": loss_divisor(num_items_in_batch),
        "batch_fingerprint": fingerprint_tensor(plan.fingerprint),
    }


def local_rows(
    plan: RankPlan | Plan,
    sample_of: SampleOf,
    masks_of: Callable[[int], Mapping[str, Mask]],
    token_fields: Mapping[str, int],
) -> dict[str, Tensor]:
    """The fields of `local_data`, reading only the sequences that this rank has tokens of."""
    lengths = _part(plan).lengths
    needed = local_sequences(plan)
    if not needed and token_fields:
        needed = [0]  # for the dtypes and widths of fields without rows
    dims = dict.fromkeys(PLAIN_FIELDS, 0) | dict(token_fields)
    sequence_masks = [layout_mask(masks_of(number)) for number in needed]
    sequences = [
        _sample_fields(sample_of(number), mask, int(lengths[number]), number, dims)
        for number, mask in zip(needed, sequence_masks, strict=True)
    ]
    taken = torch.from_numpy(_rows_among(plan, needed))
    data = {}
    for name, dim in dims.items():
        values = [fields[name] for fields in sequences] or [torch.zeros(0, dtype=torch.int64)]
        data[name] = _take(torch.cat(values, dim), dim, taken, name)
    # One label per token is not enough to say what is trained.
    if any(mask.branches is not None or mask.weights is not None for mask in sequence_masks):
        offsets = starts_of(lengths)[needed].tolist()
        labels = [fields["labels"] for fields in sequences]
        data |= _listed_targets(labels, sequence_masks, offsets, taken)
    return data


def _listed_targets(
    labels: Sequence[Tensor], sequence_masks: Sequence[Mask], offsets: Sequence[int], taken: Tensor
) -> dict[str, Tensor]:
    """All targets of the rows `taken` of these sequences, which begin at `offsets` in the batch."""
    found = [all_targets(*pair) for pair in zip(labels, sequence_masks, strict=True)]
    starts = starts_of(np.asarray([mask.length for mask in sequence_masks]))
    token = torch.cat([one.token + int(start) for one, start in zip(found, starts, strict=False)])
    local = torch.full((int(starts[-1]),), -1)
    own = (taken >= 0).nonzero().flatten()
    local[taken[own]] = own
    row = local[token]
    here = row >= 0
    return {
        "target_rows": row[here][None],
        "target_labels": torch.cat([one.label for one in found])[here][None],
        "target_weights": torch.cat([one.weight for one in found])[here][None],
        "target_tokens": torch.cat(
            [one.target + offset for one, offset in zip(found, offsets, strict=True)]
        )[here][None],
    }


# Rows


def rows_and_sequences(plan: RankPlan | Plan) -> tuple[Int64, Int64]:
    """The token of the batch in every local row, and its sequence; -1 for padding rows."""
    parts = plan.parts if isinstance(plan, Plan) else (plan,)
    rows = np.concatenate([part.row_coordinates for part in parts])
    return rows, np.searchsorted(starts_of(parts[0].lengths), rows, side="right") - 1


def local_sequences(plan: RankPlan | Plan) -> list[int]:
    """Sequences of the batch that this rank has tokens of, in the batch's order."""
    _, sequence = rows_and_sequences(plan)
    found: list[int] = np.unique(sequence[sequence >= 0]).tolist()
    return found


def _part(plan: RankPlan | Plan) -> RankPlan:
    return plan.parts[0] if isinstance(plan, Plan) else plan


def _rows_among(plan: RankPlan | Plan, needed: list[int]) -> Int64:
    """Local rows as rows of the needed sequences, concatenated; -1 for padding rows."""
    lengths = _part(plan).lengths
    rows, sequence = rows_and_sequences(plan)
    shift = np.zeros(len(lengths), np.int64)
    shift[needed] = starts_of(lengths[needed])[:-1] - starts_of(lengths)[needed]
    return np.where(rows < 0, -1, rows + shift[sequence])


def _take(value: Tensor, dim: int, rows: Tensor, name: str) -> Tensor:
    """Local rows along `dim`, with a batch dimension of 1 before it."""
    dim %= value.ndim
    if not value.shape[dim]:  # a rank that only has padding rows
        value = value.new_zeros([max(n, 1) if i == dim else n for i, n in enumerate(value.shape)])
    taken = value.index_select(dim, rows.clamp_min(0))
    padding = rows < 0
    if padding.any():
        taken = taken.index_fill(dim, padding.nonzero().flatten(), PADDING.get(name, 0))
    return taken.unsqueeze(dim)


def _sample_fields(
    sample: Mapping[str, Any], mask: Mask, length: int, index: int, dims: Mapping[str, int]
) -> dict[str, Tensor]:
    ids = input_ids_of(sample, index)
    if len(ids) != length:
        raise ValueError(f"sample {index} has {len(ids)} tokens; the batch's sequence has {length}")
    labels = labels_of(sample, ids, index)
    fields = {"input_ids": ids, "labels": labels, "shift_labels": _shift_labels(labels, mask)}
    fields["position_ids"] = torch.from_numpy(np.array(mask.resolved_positions(), np.int64))
    for name, dim in dims.items():
        if name not in fields or (name == "position_ids" and name in sample):
            fields[name] = token_field(sample, name, length, dim, index)
    return fields


# Targets


def layout_mask(masks: Mapping[str, Mask]) -> Mask:
    """A mask with the positions and targets of the sequence, whichever of its masks has them."""
    first = next(iter(masks.values()))
    return normal_mask(first.ranges, positions_and_targets(masks.values()), first.name)


def _masks_of_sequence(batch: Batch, index: int) -> dict[str, Any]:
    return {name: masks[index] for name, masks in batch.masks.items()}


def _shift_labels(labels: Tensor, mask: Mask) -> Tensor:
    """Each token's target: the label of its next token, or NO_TARGET if there is none."""
    targets = torch.from_numpy(np.array(mask.resolved_targets(), np.int64))
    return torch.where(targets >= 0, labels[targets.clamp_min(0)], NO_TARGET)


def fingerprint_tensor(fingerprint: str) -> Tensor:
    """A batch's fingerprint as int64[2]: local data consists of tensors only."""
    return torch.from_numpy(np.frombuffer(bytes.fromhex(fingerprint), np.int64).copy())


def without_targets(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tokens without targets."""
    listed = {name: data[name][:, :0] for name in TARGET_FIELDS if name in data}
    return data | listed | {name: torch.full_like(data[name], NO_TARGET) for name in PADDING}


def num_targets(data: Mapping[str, Tensor]) -> int:
    """Targets of local tokens, by their weights."""
    if "target_weights" in data:
        return int(data["target_weights"].sum())
    return int((data["shift_labels"] != NO_TARGET).sum())


def count_targets(samples: Sequence[Mapping[str, Any]], batch: Batch) -> int:
    """Targets of the batch, by their weights."""
    total = 0
    for index, sample in enumerate(samples):
        labels = labels_of(sample, input_ids_of(sample, index), index)
        targets = all_targets(labels, layout_mask(_masks_of_sequence(batch, index)))
        total += int(targets.weight.sum())
    return total


def loss_divisor(targets: int) -> Tensor:
    """The number of targets; 1 if there are none, so that the loss is 0 and not NaN."""
    return torch.tensor(max(1, targets))


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


# Losses and gradients


def next_token_loss(logits: Tensor, local_data: Mapping[str, Tensor]) -> Tensor:
    """This rank's share of the loss: summed over ranks it is the mean over all targets of the
    optimiser step, by their weights.

    `logits` are [..., rows, vocabulary]; 16-bit ones are converted to fp32. Tokens with
    several targets (`masks.prefix_tree`) train on each of them.
    """
    rows = logits.flatten(0, -2)
    wide = torch.promote_types(rows.dtype, torch.float32)
    if "target_rows" in local_data:
        row, label, weight = (local_data[name].flatten() for name in TARGET_FIELDS[:3])
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
