"""Reads samples: dicts with at least `input_ids`, a 1-D tensor, array or list of token ids."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.dataloader.errors import SampleError
from dyncp.masks import Mask, positions_and_targets
from dyncp.masks.mask import normal_mask

NO_TARGET = -100
TOKEN_NAMES = ("input_ids", "labels", "position_ids")


def input_ids_of(sample: Any, index: int) -> Tensor:
    """The sample's token ids, int64[tokens]; `index` names the sample in errors."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        given = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(f"sample {index} is {given}; expected a dict with at least 'input_ids'")
    ids = torch.as_tensor(sample["input_ids"])
    if ids.ndim != 1 or not len(ids):
        raise ValueError(
            f"input_ids of sample {index} has shape {tuple(ids.shape)}; expected [tokens], "
            "at least one token"
        )
    if ids.dtype.is_floating_point:
        raise ValueError(f"input_ids of sample {index} is {ids.dtype}; expected integers")
    return ids.long()


def masks_of(mask_fn: Any, sample: Mapping[str, Any], index: int) -> dict[str, Mask] | Mask:
    """What the mask function says for the sample; checked against its length."""
    length = len(input_ids_of(sample, index))
    try:
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


def truncate(sample: Any, length: int, index: int, token_fields: Mapping[str, int]) -> Any:
    """The sample cut to its first `length` tokens: ids, labels, positions and token fields."""
    if len(input_ids_of(sample, index)) == length:
        return sample
    cut = dict(sample)
    for name, dim in (dict.fromkeys(TOKEN_NAMES, 0) | dict(token_fields)).items():
        if name in sample:
            value = torch.as_tensor(sample[name])
            cut[name] = value.narrow(dim, 0, min(length, value.shape[dim]))
    return cut


def token_field(sample: Mapping[str, Any], name: str, length: int, dim: int, index: int) -> Tensor:
    """A field with one entry per token along `dim`."""
    if name not in sample:
        raise ValueError(f"sample {index} has no field {name!r}, which token_fields declares")
    value = torch.as_tensor(sample[name])
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
    return token_field(sample, "labels", len(ids), 0, index).long()


def shift_labels(labels: Tensor, mask: Mask) -> Tensor:
    """Each token's target: the label of its next token, or NO_TARGET where it has none."""
    targets = torch.from_numpy(np.array(mask.resolved_targets(), np.int64))
    return torch.where(targets >= 0, labels[targets.clamp_min(0)], NO_TARGET)


def layout_mask(masks: Mapping[str, Mask]) -> Mask:
    """A mask with the positions and targets of the sequence, whichever of its masks set them."""
    first = next(iter(masks.values()))
    return normal_mask(first.ranges, *positions_and_targets(masks.values()), first.name)
