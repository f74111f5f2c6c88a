"""Every token attends every token, as in encoders and diffusion models."""

from dyncp.masks.function import mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def full(length: int) -> Mask:
    """Every token attends keys [0, length)."""
    return interval_mask("full", length, (0, length))
