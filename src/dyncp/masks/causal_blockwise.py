"""Few-shot prompts: a token sees the first and the most recent blocks; the last block sees all."""

import numpy as np

from dyncp.masks.function import integer, mask_function
from dyncp.masks.mask import Mask, interval_mask


@mask_function
def causal_blockwise(length: int, block: int = 256, local: int = 2, sink: int = 1) -> Mask:
    """Tokens attend the first `sink` blocks and the `local` blocks before them.

    Token i attends keys [0, sink*block) and [max(sink*block, i-local*block), i+1), as far as they
    are causal. In the block that contains the last token, token i attends [0, i+1).

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
