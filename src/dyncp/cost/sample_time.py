"""Predicts how long training on a sample takes, from its length alone."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from dyncp.blocks import Direction
from dyncp.cost.cost_model import CostModel
from dyncp.cost.model import ModelConfig
from dyncp.cost.models import usual_decoder
from dyncp.masks import Mask, MaskFunction, NamedMasks


def sample_seconds(
    mask_fn: Any, cost: CostModel, model: ModelConfig | None, *, forward_only: bool
) -> Callable[[int], float]:
    """Returns a function that predicts the training time of a sample in seconds from its length:
    all layers of a model on one rank, with attention priced by the cost model and other work by
    tokens.

    Attention pairs are counted from the mask of that length, or from a causal mask if the mask
    function needs the sample itself. They are counted at powers of two; in between, keys per token
    are interpolated linearly, which is exact for causal and full masks. All ranks must predict the
    same times to deal the same batches, so only operations with exact IEEE rounding are used.
    """
    sizes = model or usual_decoder(cost.shape)
    directions = [Direction.FORWARD] + [Direction.BACKWARD] * (not forward_only)
    per_token = sum(sizes.seconds_per_token(cost.profile, way) for way in directions)

    @cache
    def keys_at(power: int) -> float:
        return _num_pairs(mask_fn, power) / power

    def keys_per_token(length: int) -> float:
        below = 1 << length.bit_length() - 1
        if length == below:
            return keys_at(length)
        keys, more = keys_at(below), keys_at(2 * below)
        return keys + (more - keys) * (length - below) / below

    @cache
    def seconds(length: int) -> float:
        rows = np.array([length])
        pairs = rows * keys_per_token(length)
        attention = sum(
            float(cost.tile_seconds(pairs, rows, rows, cost.shape.q_heads, way)[0])
            for way in directions
        )
        return sizes.layers * attention + length * per_token

    return seconds


def _num_pairs(mask_fn: Any, length: int) -> float:
    """Pairs of a sample's masks on average; of a causal mask if the length alone does not determine
    the masks."""
    if isinstance(mask_fn, MaskFunction | NamedMasks):
        try:
            given = mask_fn(length)
        except Exception:  # the mask needs the sample, or cannot have this length
            given = None
        masks = given.values() if isinstance(given, dict) else [given]
        pairs = [mask.num_pairs for mask in masks if isinstance(mask, Mask)]
        if pairs:
            return sum(pairs) / len(pairs)
    return length * (length + 1) / 2
