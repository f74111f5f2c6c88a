"""Few-shot prompts: demonstrations see the first and the last blocks, the final block sees all."""

import numpy as np

from dyncp.masks.function import integer, mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def causal_blockwise(length: int, block: int = 256, local: int = 2, sink: int = 1) -> Mask:
    """The first `sink` blocks and the `local` blocks before the token; all in the last block.

    Token i attends [0, sink*block) and [max(sink*block, i-local*block), i+1), cut to causal. The
    last block, which holds the last token, attends [0, i+1).

    causal_blockwise(8, block=2, local=1, sink=1)
    █·······
    ██······
    ███·····
    ████····
    █████···      token 4: sink [0, 2), local [2, 5)
    ██·███··      token 5: sink [0, 2), local [3, 6)
    ███████·
    ████████
    """
    block = integer("causal_blockwise", "block", block, 1)
    local_tokens = min(block * integer("causal_blockwise", "local", local, 0), length)
    sink_tokens = min(block * integer("causal_blockwise", "sink", sink, 0), length)
    token = np.arange(length, dtype=np.int32)
    first = np.maximum(token - local_tokens, sink_tokens)
    first[(length - 1) // block * block :] = 0
    sinks = (0, np.minimum(token + 1, sink_tokens))
    return interval_mask("causal_blockwise", length, sinks, (first, token + 1))
