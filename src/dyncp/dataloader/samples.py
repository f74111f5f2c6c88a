"""Reads samples: dicts with at least `input_ids`, a 1-D tensor, array or list of token ids."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyncp.dataloader.errors import EmptySample, SampleError
from dyncp.dataloader.generators import Drawing
from dyncp.masks import Mask, positions_and_targets
from dyncp.masks.mask import normal_mask

NO_TARGET = -100
TOKEN_NAMES = ("input_ids", "labels", "position_ids")


def input_ids_of(sample: Any, index: int) -> Tensor:
    """The sample's token ids, int64[tokens]; `index` names the sample in errors."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        given = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(f"sample {index} is {given}; expected a dict with at least 'input_ids'")
    ids = _tensor(sample["input_ids"], "input_ids", index)
    if ids.ndim != 1 or not len(ids):
        raise (EmptySample if ids.shape == (0,) else ValueError)(
            f"input_ids of sample {index} has shape {tuple(ids.shape)}; expected [tokens], "
            "at least one token"
        )
    return _integers(ids, "input_ids", index)


def _tensor(value: Any, name: str, index: int) -> Tensor:
    try:
        return torch.as_tensor(value)
    except Exception as error:
        raise ValueError(
            f"{name} of sample {index} is {type(value).__name__} and cannot be a tensor: {error}; "
            "expected numbers"
        ) from error


def _integers(value: Tensor, name: str, index: int) -> Tensor:
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise ValueError(f"{name} of sample {index} is {value.dtype}; expected integers")
    return value.long()


def sample_bytes(sample: Any, index: int, token_fields: Mapping[str, int]) -> bytes:
    """All that a rank takes of a sample: ids, labels, positions and token fields."""
    parts = [input_ids_of(sample, index).numpy().tobytes()]
    for name in dict.fromkeys([*TOKEN_NAMES[1:], *token_fields]):
        if name in sample:
            value = _tensor(sample[name], name, index).detach().cpu().contiguous()
            parts.append(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            parts.append(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return b"".join(parts)


def masks_of(
    mask_fn: Any, sample: Mapping[str, Any], index: int, drawing: Drawing
) -> dict[str, Mask] | Mask:
    """What the mask function says for the sample; checked against its length."""
    length = len(input_ids_of(sample, index))
    try:
        with drawing:
            result = mask_fn(sample)
    except Exception as error:
        raise SampleError(index, "the mask", error) from error
    return checked_masks(result, length, index)


def checked_masks(result: Any, length: int, index: int) -> dict[str, Mask] | Mask:
    """What a mask function gave for a sample of this length."""
    for mask in result.values() if isinstance(result, Mapping) else [result]:
        if not isinstance(mask, Mask):
            raise ValueError(
                f"the mask function gave {type(mask).__name__} for sample {index}; expected a "
                "Mask, or a dict of masks by name"
            )
        if mask.length != length:
            raise ValueError(
                f"the mask function gave a mask of {mask.length} tokens for sample {index}, "
                f"which has {length}"
            )
    return dict(result) if isinstance(result, Mapping) else result


def cut_sample(
    sample: Mapping[str, Any], start: int, length: int, index: int, token_fields: Mapping[str, int]
) -> dict[str, Any]:
    """`length` tokens of the sample from `start` on, in all fields with one entry per token."""
    cut = dict(sample)
    names = (*TOKEN_NAMES, "attention_mask")
    for name, dim in (dict.fromkeys(names, 0) | dict(token_fields)).items():
        if sample.get(name) is not None:
            value = _tensor(sample[name], name, index)
            first = min(start, value.shape[dim])
            cut[name] = value.narrow(dim, first, min(length, value.shape[dim] - first))
    return cut


def cut_masks(masks: dict[str, Mask] | Mask, start: int, length: int) -> dict[str, Mask] | Mask:
    """Masks of `length` tokens from `start` on of what they are for."""
    if isinstance(masks, Mask):
        return _cut_mask(masks, start, start + length)
    return {name: _cut_mask(mask, start, start + length) for name, mask in masks.items()}


def _cut_mask(mask: Mask, start: int, end: int) -> Mask:
    if mask.length == end - start:
        return mask
    positions, weights = (x if x is None else x[start:end] for x in (mask.positions, mask.weights))
    targets = None if mask.targets is None else mask.targets[start:end]
    if targets is not None:
        targets = np.where((targets >= start) & (targets < end), targets - start, -1)
    branches = mask.branches
    if branches is not None:
        branches = branches[((branches >= start) & (branches < end)).all(axis=1)] - start
    ranges = mask.ranges[start:end].clip(start, end) - start
    return Mask(ranges, positions, targets, mask.name, branches, weights)


def token_field(sample: Mapping[str, Any], name: str, length: int, dim: int, index: int) -> Tensor:
    """A field with one entry per token along `dim`."""
    if name not in sample:
        raise ValueError(f"sample {index} has no field {name!r}, which token_fields declares")
    value = _tensor(sample[name], name, index)
    if not -value.ndim <= dim < value.ndim or value.shape[dim] != length:
        raise ValueError(
            f"field {name!r} of sample {index} has shape {tuple(value.shape)}; expected "
            f"{length} tokens along dimension {dim}"
        )
    return value


def labels_of(sample: Mapping[str, Any], ids: Tensor, index: int) -> Tensor:
    """The sample's own labels, or its token ids."""
    if "labels" not in sample:
        return ids
    return _integers(token_field(sample, "labels", len(ids), 0, index), "labels", index)


def shift_labels(labels: Tensor, mask: Mask) -> Tensor:
    """Each token's target: the label of its next token, or NO_TARGET where it has none."""
    targets = torch.from_numpy(np.array(mask.resolved_targets(), np.int64))
    return torch.where(targets >= 0, labels[targets.clamp_min(0)], NO_TARGET)


class Targets(NamedTuple):
    """All targets of a sequence: the token that predicts, the label, and how often it counts."""

    token: Tensor
    label: Tensor
    weight: Tensor


def all_targets(labels: Tensor, mask: Mask) -> Targets:
    """Of tokens with one target and of those with several, in the order of tokens."""
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
    return Targets(found[0][trained], label[trained], found[2][trained])


def has_listed_targets(mask: Mask) -> bool:
    """Whether one label per token cannot say what is trained."""
    return mask.branches is not None or mask.weights is not None


def layout_mask(masks: Mapping[str, Mask]) -> Mask:
    """A mask with the positions and targets of the sequence, whichever of its masks set them."""
    first = next(iter(masks.values()))
    return normal_mask(first.ranges, *positions_and_targets(masks.values()), first.name)
