"""Chunks that attend themselves and earlier chunks, like frames in autoregressive video models."""

import numpy as np

from dyncp.masks.function import integer, mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def block_causal(length: int, chunk: int = 256) -> Mask:
    """A token attends all of its own chunk and all earlier chunks. The last chunk may be shorter.

    block_causal(5, chunk=2)
    ██···
    ██···
    ████·
    ████·
    █████
    """
    chunk = min(integer("block_causal", "chunk", chunk, 1), length)
    chunk_end = (np.arange(length, dtype=np.int64) // chunk + 1) * chunk
    return interval_mask("block_causal", length, (0, np.minimum(chunk_end, length)))
