"""Local data: a rank's part of a batch as a dict of tensors, named as Transformers takes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int64
from dyncp.blocks import Batch
from dyncp.dataloader.samples import (
    NO_TARGET,
    input_ids_of,
    labels_of,
    layout_mask,
    shift_labels,
    token_field,
)
from dyncp.plan import Plan, RankPlan

# Value of padding rows (local_multiple); other fields are padded with 0.
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
    batch). `token_fields` names further fields and the dimension that runs over their tokens: a
    [3, tokens] field with dimension 1 becomes [3, 1, rows], a [tokens, width] field with dimension
    0 becomes [1, rows, width]. A sample's own `labels` and `position_ids` win. For a whole Plan
    (virtual ranks) the rows of all ranks follow one another.
    """
    if plan.fingerprint != batch.fingerprint:
        raise ValueError(
            f"the plan is for batch {plan.fingerprint}, but this is batch {batch.fingerprint}"
        )
    fields = _batch_fields(samples, batch, token_fields or {})
    rows = torch.from_numpy(_batch_rows(plan))
    result = {name: _take(value, dim, rows, name) for name, (value, dim) in fields.items()}
    if num_items_in_batch is None:
        num_items_in_batch = count_targets(samples, batch)
    return result | {"num_items_in_batch": torch.tensor(num_items_in_batch)}


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


def _batch_fields(
    samples: Sequence[Mapping[str, Any]], batch: Batch, token_fields: Mapping[str, int]
) -> dict[str, tuple[Tensor, int]]:
    """Every field over the tokens of the whole batch, with its token dimension."""
    if len(samples) != len(batch.lengths):
        raise ValueError(
            f"got {len(samples)} samples; the batch has {len(batch.lengths)} sequences"
        )
    parts: dict[str, list[Tensor]] = {}
    dims = {"input_ids": 0, "position_ids": 0, "labels": 0, "shift_labels": 0} | dict(token_fields)
    for index, sample in enumerate(samples):
        for name, value in _sample_fields(sample, batch, index, dims).items():
            parts.setdefault(name, []).append(value)
    return {name: (torch.cat(values, dim=dims[name]), dims[name]) for name, values in parts.items()}


def _sample_fields(
    sample: Mapping[str, Any], batch: Batch, index: int, dims: Mapping[str, int]
) -> dict[str, Tensor]:
    ids = input_ids_of(sample, index)
    if len(ids) != batch.lengths[index]:
        raise ValueError(
            f"sample {index} has {len(ids)} tokens; the batch's sequence has {batch.lengths[index]}"
        )
    mask = layout_mask(_masks_of_sequence(batch, index))
    labels = labels_of(sample, ids, index)
    fields = {"input_ids": ids, "labels": labels, "shift_labels": shift_labels(labels, mask)}
    fields["position_ids"] = torch.from_numpy(np.array(mask.resolved_positions(), np.int64))
    for name, dim in dims.items():
        if name not in fields or (name == "position_ids" and name in sample):
            fields[name] = token_field(sample, name, len(ids), dim, index)
    return fields


def _batch_rows(plan: RankPlan | Plan) -> Int64:
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
    taken = value.index_select(dim, rows.clamp_min(0))
    padding = rows < 0
    if padding.any():
        taken = taken.index_fill(dim, padding.nonzero().flatten(), PADDING.get(name, 0))
    return taken.unsqueeze(dim)
