"""SampleSeconds: what training on a sample of so many tokens takes, equal on all ranks."""

from bisect import bisect_right
from typing import Any

import numpy as np

from dyncp.blocks import AttentionShape, Direction
from dyncp.cost import CostModel, ModelConfig
from dyncp.masks import Mask, MaskFunction, NamedMasks

# Of a decoder whose sizes are not known: those of Llama-3-8B, by its hidden size.
LAYERS, FFN, VOCAB = 32, 3.5, 32


class SampleSeconds:
    """All layers of a model, one rank: attention by the cost model, other work by tokens.

    The mask of a length says the attention pairs; for masks that need the sample itself they are
    those of a causal one. They are counted at powers of two: between these, the keys per token lie
    on a line, which is exact for causal and full masks. Only operations that IEEE arithmetic rounds
    in one way are used, since ranks that predict other times would deal other batches.
    """

    def __init__(
        self, mask_fn: Any, cost: CostModel, model: ModelConfig | None, *, forward_only: bool
    ) -> None:
        model = model or _assumed_model(cost.shape)
        self._mask_fn, self._cost, self._layers = mask_fn, cost, model.layers
        self._directions = [Direction.FORWARD] + [Direction.BACKWARD] * (not forward_only)
        profile = cost.profile
        self._per_token = sum(model.seconds_per_token(profile, d) for d in self._directions)
        self._grid: list[tuple[int, float]] = [(1, 1.0)]  # length, keys per token
        self._known: dict[int, float] = {}

    def __call__(self, length: int) -> float:
        if length not in self._known:
            self._known[length] = self._seconds(length)
        return self._known[length]

    def _seconds(self, length: int) -> float:
        rows = np.array([length])
        pairs = rows * self._keys_per_token(length)
        heads = self._cost.shape.q_heads
        attention = sum(
            float(self._cost.tile_seconds(pairs, rows, rows, heads, direction)[0])
            for direction in self._directions
        )
        return self._layers * attention + length * self._per_token

    def _keys_per_token(self, length: int) -> float:
        while self._grid[-1][0] < length:
            longer = 2 * self._grid[-1][0]
            self._grid.append((longer, _num_pairs(self._mask_fn, longer) / longer))
        at = min(bisect_right(self._grid, length, key=lambda point: point[0]), len(self._grid) - 1)
        (below, keys), (above, more) = self._grid[max(0, at - 1)], self._grid[at]
        if below == above:
            return keys
        return keys + (more - keys) * (length - below) / (above - below)


def _num_pairs(mask_fn: Any, length: int) -> float:
    """In the mean over a sample's masks; those of a causal mask where the length says nothing."""
    if isinstance(mask_fn, MaskFunction | NamedMasks):
        try:
            given = mask_fn(length)
        except Exception:  # a parameter comes from the sample, or does not fit this length
            given = None
        masks = given.values() if isinstance(given, dict) else [given]
        pairs = [mask.num_pairs for mask in masks if isinstance(mask, Mask)]
        if pairs:
            return sum(pairs) / len(pairs)
    return length * (length + 1) / 2


def _assumed_model(shape: AttentionShape) -> ModelConfig:
    hidden = shape.q_heads * shape.head_dim
    sizes = (hidden, LAYERS, round(FFN * hidden), VOCAB * hidden)
    return ModelConfig(*sizes, shape.q_heads, shape.kv_heads, shape.head_dim)
