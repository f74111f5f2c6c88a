"""Every token attends every token, as in encoders and diffusion models."""

from __future__ import annotations

from dyncp.masks.function import mask_function
from dyncp.masks.mask import Mask, cover, normal_mask


@mask_function
def full(length: int) -> Mask:
    """Keys [0, length) for every token."""
    return normal_mask(cover(length, (0, length)), name="full")
