"""Local data: a rank's part of a batch as a dict of tensors, named as in Transformers.

input_ids, labels          [1, rows]    labels are the sample's own, or its input_ids
shift_labels               [1, rows]    next-token targets (-100: none)
position_ids               [1, rows]    the sample's own, or those of its mask
token_fields               further per-token fields, with a batch dimension of 1
sample_ids                 [1, rows]    the sample of each row
target_rows, target_labels, target_weights, target_tokens
                           [1, targets], if tokens have several targets or weights
num_items_in_batch         []           targets of the optimiser step, on all ranks
batch_fingerprint          [2]          identifies the batch

A rank's loss is the sum over its own targets divided by `num_items_in_batch`. The loss and the
gradients of the optimiser step are the sums over ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int64, starts_of
from dyncp.blocks import Batch
from dyncp.masks import Mask, positions_and_targets
from dyncp.masks.mask import normal_mask
from dyncp.plan import Plan, RankPlan
from dyncp.samples.fields import NO_TARGET, input_ids_of, labels_of, token_field

PLAIN_FIELDS = ("input_ids", "position_ids", "labels", "shift_labels")
TARGET_FIELDS = ("target_rows", "target_labels", "target_weights", "target_tokens")
PADDING = {"labels": NO_TARGET, "shift_labels": NO_TARGET}  # other fields are padded with 0
SampleOf = Callable[[int], Mapping[str, Any]]


def make_local_data(
    samples: Sequence[Mapping[str, Any]],
    batch: Batch,
    plan: RankPlan | Plan,
    *,
    token_fields: Mapping[str, int] | None = None,
    num_items_in_batch: int | None = None,
) -> dict[str, Tensor]:
    """This rank's tokens: `input_ids`, `position_ids`, `labels` and `shift_labels` as [1, rows].

    `shift_labels` are the next-token targets, shifted before sequences are cut (-100: none). A
    sample's own `labels` and `position_ids` take precedence. `num_items_in_batch` is the number of
    targets of the whole optimiser step (default: of this batch), at least 1; if masks have weights,
    the sum of the weights. `batch_fingerprint` identifies the batch.

    `token_fields` maps further per-token fields to their token dimension: a [3, tokens] field with
    dimension 1 becomes [3, 1, rows], a [tokens, width] field with dimension 0 [1, rows, width].

    If local tokens have several targets or weights, `target_rows`, `target_labels`,
    `target_weights` and `target_tokens` (coordinates in the batch), all [1, targets], list all
    targets of local rows. Tokens with several targets then have none in `shift_labels`;
    `next_token_loss` handles both forms.

    For a whole Plan (virtual ranks), the rows of all ranks are concatenated.
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
    """The per-row fields of local data. Reads only sequences that this rank has tokens of."""
    lengths = _part(plan).lengths
    needed = local_sequences(plan)
    if not needed and token_fields:
        needed = [0]  # even without rows, fields need a dtype and a width
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
    # `shift_labels` has at most one target per token, and no weights.
    if any(mask.branches is not None or mask.weights is not None for mask in sequence_masks):
        offsets = starts_of(lengths)[needed].tolist()
        labels = [fields["labels"] for fields in sequences]
        data |= _listed_targets(labels, sequence_masks, offsets, taken)
    return data


def _listed_targets(
    labels: Sequence[Tensor], sequence_masks: Sequence[Mask], offsets: Sequence[int], taken: Tensor
) -> dict[str, Tensor]:
    """All targets of the rows `taken` of these sequences, which start at `offsets` in the batch."""
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
    """The coordinate of the token in each local row, and its sequence; -1 for padding rows."""
    parts = plan.parts if isinstance(plan, Plan) else (plan,)
    rows = np.concatenate([part.row_coordinates for part in parts])
    return rows, np.searchsorted(starts_of(parts[0].lengths), rows, side="right") - 1


def local_sequences(plan: RankPlan | Plan) -> list[int]:
    """The sequences that this rank has tokens of, in the batch's order."""
    _, sequence = rows_and_sequences(plan)
    found: list[int] = np.unique(sequence[sequence >= 0]).tolist()
    return found


def _part(plan: RankPlan | Plan) -> RankPlan:
    return plan.parts[0] if isinstance(plan, Plan) else plan


def _rows_among(plan: RankPlan | Plan, needed: list[int]) -> Int64:
    """Each local row's index into the concatenated `needed` sequences; -1 for padding rows."""
    lengths = _part(plan).lengths
    rows, sequence = rows_and_sequences(plan)
    shift = np.zeros(len(lengths), np.int64)
    shift[needed] = starts_of(lengths[needed])[:-1] - starts_of(lengths)[needed]
    return np.where(rows < 0, -1, rows + shift[sequence])


def _take(value: Tensor, dim: int, rows: Tensor, name: str) -> Tensor:
    """The given rows of a field along `dim`, with a batch dimension of 1 inserted before it."""
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
    """A mask with the positions and targets of a sequence, combined from all its masks."""
    first = next(iter(masks.values()))
    return normal_mask(first.ranges, positions_and_targets(masks.values()), first.name)


def _masks_of_sequence(batch: Batch, index: int) -> dict[str, Any]:
    return {name: masks[index] for name, masks in batch.masks.items()}


def _shift_labels(labels: Tensor, mask: Mask) -> Tensor:
    """Each token's target: the label of its next token, or NO_TARGET if there is none."""
    targets = torch.from_numpy(np.array(mask.resolved_targets(), np.int64))
    return torch.where(targets >= 0, labels[targets.clamp_min(0)], NO_TARGET)


def fingerprint_tensor(fingerprint: str) -> Tensor:
    """A batch's fingerprint as int64[2], because local data consists of tensors."""
    return torch.from_numpy(np.frombuffer(bytes.fromhex(fingerprint), np.int64).copy())


def without_targets(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The local data with all targets removed."""
    listed = {name: data[name][:, :0] for name in TARGET_FIELDS if name in data}
    return data | listed | {name: torch.full_like(data[name], NO_TARGET) for name in PADDING}


def num_targets(data: Mapping[str, Tensor]) -> int:
    """Number of targets of the local tokens, counted by weight."""
    if "target_weights" in data:
        return int(data["target_weights"].sum())
    return int((data["shift_labels"] != NO_TARGET).sum())


def count_targets(samples: Sequence[Mapping[str, Any]], batch: Batch) -> int:
    """Number of targets of the whole batch, counted by weight."""
    total = 0
    for index, sample in enumerate(samples):
        labels = labels_of(sample, input_ids_of(sample, index), index)
        targets = all_targets(labels, layout_mask(_masks_of_sequence(batch, index)))
        total += int(targets.weight.sum())
    return total


def loss_divisor(targets: int) -> Tensor:
    """The number of targets, but at least 1, so that a loss without targets is 0 and not NaN."""
    return torch.tensor(max(1, targets))


class Targets(NamedTuple):
    """All targets of a sequence: the token that predicts, the token that it predicts, the label and
    the weight."""

    token: Tensor
    target: Tensor
    label: Tensor
    weight: Tensor


def all_targets(labels: Tensor, mask: Mask) -> Targets:
    """The targets of all tokens, ordered by token; a token may have several."""
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
