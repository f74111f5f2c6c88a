"""Attention sinks and a sliding window (StreamingLLM, LM-Infinite)."""

import numpy as np

from dyncp.masks.function import integer, mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def lambda_shaped(length: int, sinks: int = 64, window: int = 4096) -> Mask:
    """Token i attends keys [0, min(sinks, i+1)) and [max(0, i-window+1), i+1).

    lambda_shaped(6, sinks=1, window=2)
    █·····
    ██····
    ███···
    █·██··
    █··██·
    █···██
    """
    sinks = min(integer("lambda_shaped", "sinks", sinks, 0), length)
    window = min(integer("lambda_shaped", "window", window, 1), length)
    token = np.arange(length, dtype=np.int32)
    sink = (0, np.minimum(token + 1, sinks))
    near = (np.maximum(token - window + 1, 0), token + 1)
    return interval_mask("lambda_shaped", length, sink, near)
