"""Padding in samples: tokens that `attention_mask` calls padding are left out, before all else."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from dyncp.dataloader.samples import cut_sample

REFUSED = ("padding_mask", "key_padding_mask")


def without_padding(sample: Any, index: int, token_fields: Mapping[str, int]) -> Any:
    """The sample without the tokens before the first and after the last that `attention_mask` says
    1 of. Fields that `token_fields` declares are the user's own, whatever their name."""
    if not isinstance(sample, Mapping):
        return sample  # said where its tokens are read
    refused = [name for name in REFUSED if name in sample and name not in token_fields]
    if refused:
        raise ValueError(
            f"sample {index} has a field {refused[0]!r}, which says of tokens that they are "
            "padding; give it as 'attention_mask' (1: token, 0: padding), leave the padding out, "
            "or declare the field in token_fields"
        )
    if sample.get("attention_mask") is None or "attention_mask" in token_fields:
        return sample
    if torch.as_tensor(sample.get("input_ids", 0)).ndim != 1:
        return sample
    first, last = _kept(sample, index)
    if (first, last) == (0, len(sample["input_ids"])):
        return sample
    return cut_sample(sample, first, last - first, index, token_fields)


def _kept(sample: Mapping[str, Any], index: int) -> tuple[int, int]:
    """First token that is no padding, and the one after the last."""
    mask = torch.as_tensor(sample["attention_mask"])
    if mask.shape != (len(sample["input_ids"]),) or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"attention_mask of sample {index} has shape {tuple(mask.shape)}; expected one 1 "
            f"(token) or 0 (padding) for each of its {len(sample['input_ids'])} tokens; what "
            "tokens attend to is said by the mask function"
        )
    kept = mask.nonzero().flatten().tolist()
    if not kept:
        return 0, 0
    if len(kept) != kept[-1] + 1 - kept[0]:
        hole = next(a + 1 for a, b in pairwise(kept) if b != a + 1)
        raise ValueError(
            f"attention_mask of sample {index} is 0 at token {hole}, between tokens that are no "
            "padding; leave these tokens out, or say what tokens attend to by the mask function"
        )
    return kept[0], kept[-1] + 1
