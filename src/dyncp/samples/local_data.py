"""Local data: a rank's part of a batch as a dict of tensors, named as in Transformers.

input_ids, labels          [1, rows]    labels are the sample's own, or its input_ids
shift_labels               [1, rows]    next-token targets (-100: none); unless tokens have several
position_ids               [1, rows]    the sample's own, or those of its mask
token_fields               further per-token fields, with a batch dimension of 1
sample_ids                 [1, rows]    the sample of each row
target_rows, target_labels, target_weights, target_tokens
                           [1, targets], if tokens have several targets or weights: the row that
                           predicts, the label, how often it counts, and the predicted token's
                           coordinate in the batch
num_items_in_batch         []           targets of the optimiser step, on all ranks
batch_fingerprint          [2]          identifies the batch

A rank's loss is the sum over its own targets divided by `num_items_in_batch`. The loss and the
gradients of the optimiser step are the sums over ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int64, starts_of
from dyncp.blocks import Batch
from dyncp.masks import Mask
from dyncp.plan import Plan, RankPlan
from dyncp.samples.checks import SampleChecks, SampleLimits
from dyncp.samples.fields import (
    NO_TARGET,
    input_ids_of,
    labels_of,
    token_field,
    without_padding,
)
from dyncp.samples.targets import (
    LABELS,
    all_targets,
    check_targets,
    count_targets,
    layout_mask,
    loss_divisor,
    masks_of_sequence,
    shifted,
)

NO_SAMPLE = -1  # in sample_ids: a padding row, or a row of a filler
PLAIN_FIELDS = ("input_ids", "position_ids", "labels", "shift_labels")
PADDING = dict.fromkeys(LABELS, NO_TARGET)  # other fields are padded with 0


@dataclass(frozen=True, eq=False)
class LocalSequence:
    """A sequence of a batch: its sample and its masks, and the sample's number for errors."""

    sample: Mapping[str, Any]
    masks: Mapping[str, Mask]
    number: int

    @cached_property
    def layout(self) -> Mask:
        """Its positions and targets, as a mask."""
        return layout_mask(self.masks)


class LocalData(dict[str, Any]):
    """Local data, which says why `shift_labels` are missing."""

    def __missing__(self, name: str) -> Any:
        if name == "shift_labels" and "target_rows" in self:
            raise ValueError(
                "these local data have no shift_labels, because tokens have several targets or "
                "weights (prefix trees): use dyncp.next_token_loss, or target_rows, target_labels "
                "and target_weights, which list all targets (docs/training.md)"
            )
        raise KeyError(name)


def make_local_data(
    samples: Sequence[Mapping[str, Any]],
    batch: Batch,
    plan: RankPlan | Plan,
    *,
    token_fields: Mapping[str, int] | None = None,
    num_items_in_batch: int | None = None,
    list_targets: bool = False,
) -> dict[str, Tensor]:
    """This rank's tokens: `input_ids`, `position_ids`, `labels` and `shift_labels` as [1, rows].

    `shift_labels` are the next-token targets, shifted before sequences are cut (-100: none). Tokens
    that can see their target have none. A sample's own `labels` and `position_ids` take precedence.
    `num_items_in_batch` is the number of targets of the whole optimiser step (default: of this
    batch), at least 1; if masks have weights, the sum of the weights. `batch_fingerprint`
    identifies the batch.

    `token_fields` maps further per-token fields to their token dimension: a [3, tokens] field with
    dimension 1 becomes [3, 1, rows], a [tokens, width] field with dimension 0 [1, rows, width].

    If tokens of the batch have several targets or weights, or with `list_targets`, the targets of
    local rows are listed instead of being in `shift_labels`: `target_rows`, `target_labels`,
    `target_weights` and `target_tokens` (coordinates in the batch), all [1, targets].
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
    sequences = [
        LocalSequence(sample, masks_of_sequence(batch, number), number)
        for number, sample in enumerate(samples)
    ]
    checks = SampleChecks(SampleLimits(), warns=False)
    for sequence in sequences:
        _check_sample(sequence, checks, token_fields or {})
    listed = list_targets or any(_needs_lists(one.layout) for one in sequences)
    data = local_rows(
        plan, sequences.__getitem__, token_fields or {}, list_targets=listed, checks=checks
    )
    if num_items_in_batch is None:
        num_items_in_batch = count_targets(samples, batch)
    return LocalData(
        data
        | {
            "num_items_in_batch": loss_divisor(num_items_in_batch),
            "batch_fingerprint": fingerprint_tensor(plan.fingerprint),
        }
    )


def _check_sample(
    sequence: LocalSequence, checks: SampleChecks, token_fields: Mapping[str, int]
) -> None:
    """Raises ValueError for a sample that would be trained on, but not as it is meant."""
    sample, number = sequence.sample, sequence.number
    if without_padding(sample, number, token_fields) is not sample:
        raise ValueError(
            f"attention_mask of sample {number} marks padding, which its sequence in the batch has "
            "as tokens: remove the padding before the batch is made"
        )
    checks.check(sample, number, token_fields)
    checks.compare_labels(sample, number)
    check_targets(sample, sequence.masks, number)


def local_rows(
    plan: RankPlan | Plan,
    sequence_of: Callable[[int], LocalSequence],
    token_fields: Mapping[str, int],
    *,
    list_targets: bool = False,
    checks: SampleChecks | None = None,
) -> dict[str, Tensor]:
    """The per-row fields of local data. Reads only sequences that this rank has tokens of. Lists
    targets if some of these sequences need it, or with `list_targets`."""
    lengths = _part(plan).lengths
    needed = local_sequences(plan)
    if not needed and token_fields:
        needed = [0]  # even without rows, fields need a dtype and a width
    dims = dict.fromkeys(PLAIN_FIELDS, 0) | dict(token_fields)
    sequences = [sequence_of(number) for number in needed]
    masks = [sequence.layout for sequence in sequences]
    fields = [
        _sequence_fields(sequence, mask, int(lengths[number]), dims)
        for number, sequence, mask in zip(needed, sequences, masks, strict=True)
    ]
    for sequence, found in zip(sequences, fields, strict=True):
        if checks is not None:
            checks.check_positions(found["position_ids"], sequence.number)
    taken = torch.from_numpy(_rows_among(plan, needed))
    data = {}
    for name, dim in dims.items():
        values = [found[name] for found in fields] or [torch.zeros(0, dtype=torch.int64)]
        data[name] = _take(torch.cat(values, dim), dim, taken, name)
    if list_targets or any(map(_needs_lists, masks)):
        offsets = starts_of(lengths)[needed].tolist()
        del data["shift_labels"]
        data |= _listed_targets([found["labels"] for found in fields], masks, offsets, taken)
    return data


def collated(
    collate: Callable[[dict[str, Any], list[Any]], Mapping[str, Any]],
    data: dict[str, Any],
    samples: list[Any],
) -> dict[str, Any]:
    """What a user's `collate` returns, if its fields still belong to the rows of the plan."""
    rows = data["input_ids"].shape[-1]
    try:
        found = collate(LocalData(data), samples)
    except Exception as error:
        raise RuntimeError(f"collate raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f"collate returned {type(found).__name__}; expected a dict: the local data, with any "
            "further fields"
        )
    for name in PLAIN_FIELDS:
        given = found.get(name)
        if isinstance(given, Tensor) and given.shape[-1] != rows:
            raise ValueError(
                f"collate returned {name} of shape {tuple(given.shape)}; the plan has {rows} rows "
                f"on this rank, so its last dimension must stay {rows}"
            )
    return dict(found)


def _needs_lists(mask: Mask) -> bool:
    """Whether `shift_labels`, which have one target per token and no weights, are not enough."""
    return mask.branches is not None or mask.weights is not None


def _listed_targets(
    labels: Sequence[Tensor], masks: Sequence[Mask], offsets: Sequence[int], taken: Tensor
) -> dict[str, Tensor]:
    """All targets of the rows `taken` of these sequences, which start at `offsets` in the batch."""
    none = torch.zeros(0, dtype=torch.int64)
    found = [all_targets(*pair) for pair in zip(labels, masks, strict=True)]
    starts = starts_of(np.asarray([mask.length for mask in masks], np.int64)).tolist()
    local = torch.full((starts[-1],), -1)
    own = (taken >= 0).nonzero().flatten()
    local[taken[own]] = own
    token = [one.token + start for one, start in zip(found, starts, strict=False)]
    target = [one.target + offset for one, offset in zip(found, offsets, strict=True)]
    row = local[torch.cat([none, *token])]
    columns = {
        "target_rows": row,
        "target_labels": torch.cat([none, *(one.label for one in found)]),
        "target_weights": torch.cat([none, *(one.weight for one in found)]),
        "target_tokens": torch.cat([none, *target]),
    }
    return {name: column[row >= 0][None] for name, column in columns.items()}


# Rows


def rows_and_sequences(plan: RankPlan | Plan) -> tuple[Int64, Int64]:
    """The coordinate of the token in each local row, and its sequence; -1 for padding rows."""
    parts = plan.parts if isinstance(plan, Plan) else (plan,)
    rows = np.concatenate([part.row_coordinates for part in parts])
    return rows, np.searchsorted(starts_of(parts[0].lengths), rows, side="right") - 1


def sample_ids_of(plan: RankPlan | Plan, indices: Sequence[int]) -> Tensor:
    """The index in the dataset of each local row's sample, `[1, rows]`, given those of the batch's
    sequences."""
    _, sequence = rows_and_sequences(plan)
    found = np.asarray(indices, np.int64)[sequence]
    return torch.from_numpy(np.where(sequence < 0, NO_SAMPLE, found))[None]


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


def _sequence_fields(
    sequence: LocalSequence, mask: Mask, length: int, dims: Mapping[str, int]
) -> dict[str, Tensor]:
    sample, number = sequence.sample, sequence.number
    ids = input_ids_of(sample, number)
    if len(ids) != length:
        raise ValueError(
            f"sample {number} has {len(ids)} tokens; the batch's sequence has {length}"
        )
    labels = labels_of(sample, ids, number)
    fields = {"input_ids": ids, "labels": labels, "shift_labels": shifted(labels, mask)}
    fields["position_ids"] = torch.from_numpy(np.array(mask.resolved_positions(), np.int64))
    for name, dim in dims.items():
        own_positions = name == "position_ids" and name in sample
        if name not in fields or own_positions:
            fields[name] = token_field(sample, name, length, dim, number)
    return fields


def fingerprint_tensor(fingerprint: str) -> Tensor:
    """A batch's fingerprint as int64[2], because local data consists of tensors."""
    return torch.from_numpy(np.frombuffer(bytes.fromhex(fingerprint), np.int64).copy())
