"""Local data: a rank's part of a batch as a dict of tensors, named as Transformers takes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int32, Int64, starts_of
from dyncp.blocks import Batch
from dyncp.dataloader.samples import (
    NO_TARGET,
    input_ids_of,
    labels_of,
    layout_mask,
    shift_labels,
    token_field,
)
from dyncp.masks import Mask
from dyncp.plan import Plan, RankPlan

# Value of padding rows (local_multiple); other fields are padded with 0.
PLAIN_FIELDS = ("input_ids", "position_ids", "labels", "shift_labels")
PADDING = {"labels": NO_TARGET, "shift_labels": NO_TARGET}


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
    batch), at least 1; `batch_fingerprint` says which batch it is. `token_fields` names further
    fields and the dimension that runs over their tokens: a [3, tokens] field with dimension 1
    becomes [3, 1, rows], a [tokens, width] field with dimension 0 becomes [1, rows, width]. A
    sample's own `labels` and `position_ids` win. For a whole Plan (virtual ranks) the rows of all
    ranks follow one another.
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
        lambda number: layout_mask(_masks_of_sequence(batch, number)),
        token_fields or {},
    )
    if num_items_in_batch is None:
        num_items_in_batch = count_targets(samples, batch)
    marks = {"batch_fingerprint": fingerprint_tensor(plan.fingerprint)}
    return data | {"num_items_in_batch": divisor(num_items_in_batch)} | marks


def local_rows(
    plan: RankPlan | Plan,
    sample_of: Callable[[int], Mapping[str, Any]],
    mask_of: Callable[[int], Mask],
    token_fields: Mapping[str, int],
) -> dict[str, Tensor]:
    """The fields of `local_data`, from those sequences alone that this rank has tokens of."""
    lengths = _part(plan).lengths
    rows = batch_rows(plan)
    needed = sequences_of(rows, lengths)
    if not len(needed) and token_fields:
        needed = np.zeros(1, np.int64)  # for the dtypes and widths of fields without rows
    dims = dict.fromkeys(PLAIN_FIELDS, 0) | dict(token_fields)
    parts: dict[str, list[Tensor]] = {name: [] for name in dims}
    for number in needed.tolist():
        length = int(lengths[number])
        for name, value in _sample_fields(
            sample_of(number), mask_of(number), length, number, dims
        ).items():
            parts[name].append(value)
    taken = torch.from_numpy(_rows_among(rows, lengths, needed))
    empty = torch.zeros(0, dtype=torch.int64)
    fields = {
        name: torch.cat(values, dim=dims[name]) if values else empty
        for name, values in parts.items()
    }
    return {name: _take(value, dims[name], taken, name) for name, value in fields.items()}


def local_sequences(plan: RankPlan | Plan) -> list[int]:
    """Sequences of the batch that this rank has tokens of, in the batch's order."""
    found: list[int] = sequences_of(batch_rows(plan), _part(plan).lengths).tolist()
    return found


def divisor(targets: int) -> Tensor:
    """What losses are divided by: the targets, or 1 where there are none, which makes the loss of
    such a step 0 and not NaN."""
    return torch.tensor(max(1, targets))


def fingerprint_tensor(fingerprint: str) -> Tensor:
    """A batch's fingerprint as int64[2]: local data carry tensors only."""
    return torch.from_numpy(np.frombuffer(bytes.fromhex(fingerprint), np.int64).copy())


def without_targets(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tokens, trained on nothing."""
    return data | {name: torch.full_like(data[name], NO_TARGET) for name in PADDING}


def num_targets(data: Mapping[str, Tensor]) -> int:
    """Number of local tokens that have a target."""
    return int((data["shift_labels"] != NO_TARGET).sum())


def count_targets(samples: Sequence[Mapping[str, Any]], batch: Batch) -> int:
    """Number of tokens of the batch that have a target."""
    total = 0
    for index, sample in enumerate(samples):
        labels = labels_of(sample, input_ids_of(sample, index), index)
        targets = shift_labels(labels, layout_mask(_masks_of_sequence(batch, index)))
        total += int((targets != NO_TARGET).sum())
    return total


def _masks_of_sequence(batch: Batch, index: int) -> dict[str, Any]:
    return {name: masks[index] for name, masks in batch.masks.items()}


def _sample_fields(
    sample: Mapping[str, Any], mask: Mask, length: int, index: int, dims: Mapping[str, int]
) -> dict[str, Tensor]:
    ids = input_ids_of(sample, index)
    if len(ids) != length:
        raise ValueError(f"sample {index} has {len(ids)} tokens; the batch's sequence has {length}")
    labels = labels_of(sample, ids, index)
    fields = {"input_ids": ids, "labels": labels, "shift_labels": shift_labels(labels, mask)}
    fields["position_ids"] = torch.from_numpy(np.array(mask.resolved_positions(), np.int64))
    for name, dim in dims.items():
        if name not in fields or (name == "position_ids" and name in sample):
            fields[name] = token_field(sample, name, length, dim, index)
    return fields


def _part(plan: RankPlan | Plan) -> RankPlan:
    return plan.parts[0] if isinstance(plan, Plan) else plan


def sequences_of(rows: Int64, lengths: Int32) -> Int64:
    """Sequences that have tokens among these rows."""
    found = np.unique(np.searchsorted(starts_of(lengths), rows[rows >= 0], side="right") - 1)
    return found.astype(np.int64)


def _rows_among(rows: Int64, lengths: Int32, needed: Int64) -> Int64:
    """Rows of the batch as rows of its needed sequences put below each other; -1 stays."""
    shift = np.zeros(len(lengths), np.int64)
    shift[needed] = starts_of(lengths[needed])[:-1] - starts_of(lengths)[needed]
    sequence = np.searchsorted(starts_of(lengths), rows.clip(0), side="right") - 1
    return np.where(rows < 0, -1, rows + shift[sequence.clip(0, len(lengths) - 1)])


def batch_rows(plan: RankPlan | Plan) -> Int64:
    """The token of the batch in every local row; -1 for padding rows."""
    parts = plan.parts if isinstance(plan, Plan) else (plan,)
    padded = [
        np.append(part.local_coordinates, np.full(part.local_rows - part.local_tokens, -1))
        for part in parts
    ]
    return np.concatenate(padded).astype(np.int64)


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
