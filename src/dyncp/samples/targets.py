"""What tokens predict: the targets of a sequence, how many there are, and which are refused.

By default a token predicts the label of the next token. A token never trains on a target that it
can see (`masks.sees_target`): it has none. Labels of the user's own that a token can see are an
error, and so is a sample that has only such targets. Under `masks.own_labels`, tokens predict
labels of their own place, which the sample must have.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int64
from dyncp.blocks import Batch
from dyncp.masks import Mask, positions_and_targets, sees_target
from dyncp.masks.mask import default_targets, normal_mask
from dyncp.samples.fields import NO_TARGET, input_ids_of, labels_of

TARGET_FIELDS = ("target_rows", "target_labels", "target_weights", "target_tokens")
LABELS = ("labels", "shift_labels")
HIDDEN = (
    "if input_ids hide what labels say (masked-language training), use masks.own_labels(mask), "
    "with labels of the sample's own"
)


class Targets(NamedTuple):
    """All targets of a sequence: the token that predicts, the token that it predicts, the label and
    the weight."""

    token: Tensor
    target: Tensor
    label: Tensor
    weight: Tensor


def layout_mask(masks: Mapping[str, Mask]) -> Mask:
    """A mask with the positions and targets of a sequence, combined from all its masks, and without
    the targets that a token can see."""
    mask = _combined(masks)
    token, target = _pairs(mask)
    seen = sees_target(tuple(masks.values()), token, target) & (token != target)
    if not seen.any():
        return mask
    targets, branches = mask.resolved_targets().copy(), mask.branches
    targets[token[seen]] = -1
    if branches is not None:
        branches = branches[~sees_target(tuple(masks.values()), *branches.T.astype(np.int64))]
    marks = mask.marks._replace(targets=targets, branches=branches)
    return normal_mask(mask.ranges, marks, mask.name)


def check_targets(sample: Mapping[str, Any], masks: Mapping[str, Mask], number: int) -> None:
    """Raises ValueError for a sample whose targets tokens can see, as the top of this file says."""
    mask = _combined(masks)
    token, target = _pairs(mask)
    seen = sees_target(tuple(masks.values()), token, target)
    if not seen.any():
        return
    ids = input_ids_of(sample, number)
    labels, has_own = labels_of(sample, ids, number), "labels" in sample
    trained = (labels != NO_TARGET).numpy()[target]
    token, target, seen = token[trained], target[trained], seen[trained]
    about = f"sample {number} under mask {mask.name!r}"
    if (seen & (token == target)).any():
        _check_own_labels(about, ids, labels, has_own=has_own)
    seen &= token != target
    if has_own and seen.any():
        first = int(np.argmax(seen))
        raise ValueError(
            f"{about}: token {token[first]} attends what it is to predict, token {target[first]}, "
            f"so it would learn to copy it. Set labels to -100 where tokens see them; {HIDDEN}"
        )
    if seen.all() and len(seen):
        raise ValueError(
            f"{about}: all tokens attend what they are to predict, so none is left to train on; "
            f"{HIDDEN}; if your loss needs no targets, give labels that are all -100"
        )


def _check_own_labels(about: str, ids: Tensor, labels: Tensor, *, has_own: bool) -> None:
    if not has_own:
        raise ValueError(
            f"{about}: tokens predict labels of their own place, but the sample has no labels; "
            "its input_ids would be both input and target"
        )
    if len(ids) > 1 and torch.equal(ids, labels):
        raise ValueError(
            f"{about}: tokens predict labels of their own place, and its labels equal its "
            "input_ids, so they would learn to copy. Hide the tokens to be predicted in input_ids, "
            "and set the labels of all others to -100"
        )


def _combined(masks: Mapping[str, Mask]) -> Mask:
    first = next(iter(masks.values()))
    return normal_mask(first.ranges, positions_and_targets(masks.values()), first.name)


def _pairs(mask: Mask) -> tuple[Int64, Int64]:
    """All (token, target) pairs, ordered by token."""
    single = default_targets(mask.length) if mask.targets is None else mask.targets
    token = np.flatnonzero(single >= 0)
    target = single[token].astype(np.int64)
    if mask.branches is None:
        return token, target
    pairs = np.concatenate([np.stack([token, target], axis=1), mask.branches])
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")].astype(np.int64)
    return ordered[:, 0], ordered[:, 1]


def all_targets(labels: Tensor, mask: Mask) -> Targets:
    """The targets of all tokens, ordered by token; a token may have several."""
    token, target = _pairs(mask)
    weight = np.ones(len(token), np.int64) if mask.weights is None else mask.weights[target]
    found = [torch.from_numpy(np.array(x, np.int64)) for x in (token, target, weight)]
    label = labels[found[1]]
    trained = label != NO_TARGET
    predicting, predicted, counted = (x[trained] for x in found)
    return Targets(predicting, predicted, label[trained], counted)


def shifted(labels: Tensor, mask: Mask) -> Tensor:
    """Each token's target: the label of its next token, or NO_TARGET if there is none."""
    targets = torch.from_numpy(np.array(mask.resolved_targets(), np.int64))
    return torch.where(targets >= 0, labels[targets.clamp_min(0)], NO_TARGET)


def masks_of_sequence(batch: Batch, index: int) -> dict[str, Mask]:
    return {name: masks[index] for name, masks in batch.masks.items()}


def count_targets(samples: Sequence[Mapping[str, Any]], batch: Batch) -> int:
    """Number of targets of the whole batch, counted by weight."""
    total = 0
    for index, sample in enumerate(samples):
        labels = labels_of(sample, input_ids_of(sample, index), index)
        targets = all_targets(labels, layout_mask(masks_of_sequence(batch, index)))
        total += int(targets.weight.sum())
    return total


def num_targets(data: Mapping[str, Tensor]) -> int:
    """Number of targets of the local tokens, counted by weight."""
    if "target_weights" in data:
        return int(data["target_weights"].sum())
    return int((data["shift_labels"] != NO_TARGET).sum())


def without_targets(data: dict[str, Any]) -> dict[str, Any]:
    """The local data with all targets removed."""
    listed = {name: data[name][:, :0] for name in TARGET_FIELDS if name in data}
    labels = {name: torch.full_like(data[name], NO_TARGET) for name in LABELS if name in data}
    return data | listed | labels


def loss_divisor(targets: int) -> Tensor:
    """The number of targets, but at least 1, so that a loss without targets is 0 and not NaN."""
    return torch.tensor(max(1, targets))
