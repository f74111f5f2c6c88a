"""Masks: which keys every query token of a sequence may attend.

`masks.causal(4096)` is a mask; `masks.causal` is a mask function, which takes a sample.
"""

from dyncp.masks.block_causal import block_causal
from dyncp.masks.causal import causal
from dyncp.masks.causal_blockwise import causal_blockwise
from dyncp.masks.document_packed import document_packed
from dyncp.masks.full import full
from dyncp.masks.function import MaskFunction, mask_function
from dyncp.masks.global_sliding import global_sliding
from dyncp.masks.lambda_shaped import lambda_shaped
from dyncp.masks.mask import Mask
from dyncp.masks.mask_mod import from_mask_mod
from dyncp.masks.named import NamedMasks, named, positions_and_targets
from dyncp.masks.pairs import count_batch_tile_pairs, count_tile_pairs, list_tiles
from dyncp.masks.prefix_lm import prefix_lm
from dyncp.masks.registry import ALIASES, BUILTIN, by_name
from dyncp.masks.shared_question import shared_question
from dyncp.masks.sliding_window import sliding_window
from dyncp.masks.within import within

document = document_packed
shared_prefix = shared_question
streaming_llm = lambda_shaped

__all__ = [
    "ALIASES",
    "BUILTIN",
    "Mask",
    "MaskFunction",
    "NamedMasks",
    "block_causal",
    "by_name",
    "causal",
    "causal_blockwise",
    "count_batch_tile_pairs",
    "count_tile_pairs",
    "document",
    "document_packed",
    "from_mask_mod",
    "full",
    "global_sliding",
    "lambda_shaped",
    "list_tiles",
    "mask_function",
    "named",
    "positions_and_targets",
    "prefix_lm",
    "shared_prefix",
    "shared_question",
    "sliding_window",
    "streaming_llm",
    "within",
]
