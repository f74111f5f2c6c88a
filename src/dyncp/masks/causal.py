"""Every token attends itself and everything before it."""

import numpy as np

from dyncp.masks.function import mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def causal(length: int) -> Mask:
    """Token i attends keys [0, i+1).

    causal(4)
    █···
    ██··
    ███·
    ████
    """
    return interval_mask("causal", length, (0, np.arange(1, length + 1)))
