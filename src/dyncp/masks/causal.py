"""Every token attends itself and everything before it."""

from __future__ import annotations

import numpy as np

from dyncp.masks.function import mask_function
from dyncp.masks.mask import Mask, cover, normal_mask


@mask_function
def causal(length: int) -> Mask:
    """Keys [0, i+1) for token i.

    causal(4)
    █···
    ██··
    ███·
    ████
    """
    token = np.arange(length, dtype=np.int32)
    return normal_mask(cover(length, (0, token + 1)), name="causal")
