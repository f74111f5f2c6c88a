"""A prefix that attends itself in both directions, followed by causal text."""

import numpy as np

from dyncp.masks.function import from_sample, integer, mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def prefix_lm(length: int, prefix: int = from_sample("prefix_length")) -> Mask:
    """Token i attends keys [0, max(prefix, i+1)). `prefix` defaults to the sample's
    `prefix_length`.

    prefix_lm(5, prefix=3)
    ███··
    ███··
    ███··
    ████·
    █████
    """
    prefix = integer("prefix_lm", "prefix", prefix, 0, length)
    token = np.arange(length, dtype=np.int32)
    return interval_mask("prefix_lm", length, (0, np.maximum(token + 1, prefix)))
