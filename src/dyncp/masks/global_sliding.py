"""A few global tokens and a window for the rest (Longformer, or BigBird without random blocks)."""

import numpy as np

from dyncp.masks.function import integer, mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def global_sliding(
    length: int, num_global: int = 64, window: int = 4096, causal: bool = True
) -> Mask:
    """The first `num_global` tokens attend all tokens and are attended by all.

    Other pairs are allowed if |i - j| < window, so the window reaches `window`-1 tokens to each
    side (Longformer's `attention_window` counts both sides: 2*window-1 here). With `causal`, the
    default, a token attends only keys up to itself. The mask then equals `lambda_shaped`.

    global_sliding(6, num_global=1, window=2, causal=False)
    ██████
    ███···
    ████··
    █·███·
    █··███
    █···██
    """
    num_global = min(integer("global_sliding", "num_global", num_global, 0), length)
    window = min(integer("global_sliding", "window", window, 1), length)
    token = np.arange(length, dtype=np.int32)
    first = np.maximum(token - window + 1, 0)
    last = np.minimum(token + window, length)
    first[:num_global], last[:num_global] = 0, length
    seen = token + 1 if causal else length
    everywhere = (0, np.minimum(num_global, seen))
    return interval_mask("global_sliding", length, everywhere, (first, np.minimum(last, seen)))
