"""Every token attends the last few tokens, as in the local layers of Mistral or Gemma."""

import numpy as np

from dyncp.masks.function import integer, mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def sliding_window(length: int, window: int = 4096) -> Mask:
    """Token i attends keys [max(0, i-window+1), i+1): itself and the `window`-1 tokens before it.

    sliding_window(5, window=2)
    █····
    ██···
    ·██··
    ··██·
    ···██
    """
    window = min(integer("sliding_window", "window", window, 1), length)
    token = np.arange(length, dtype=np.int32)
    near = (np.maximum(token - window + 1, 0), token + 1)
    return interval_mask("sliding_window", length, near)
