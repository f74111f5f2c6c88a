"""Masks: which keys every query token of a sequence may attend.

`masks.causal(4096)` is a mask; `masks.causal` is a mask function, which takes a sample.
"""

from dyncp.masks.block_causal import block_causal
from dyncp.masks.causal import causal
from dyncp.masks.causal_blockwise import causal_blockwise
from dyncp.masks.document_packed import document_packed
from dyncp.masks.full import full
from dyncp.masks.function import (
    MaskFunction,
    NamedMasks,
    ParametricMask,
    from_mask_mod,
    mask_function,
    named,
    positions_and_targets,
)
from dyncp.masks.global_sliding import global_sliding
from dyncp.masks.lambda_shaped import lambda_shaped
from dyncp.masks.linear_ranges import LinearRanges, find_runs, join_ranges
from dyncp.masks.mask import Mask
from dyncp.masks.pairs import count_batch_tile_pairs, count_tile_pairs, list_tiles
from dyncp.masks.prefix_lm import prefix_lm
from dyncp.masks.prefix_tree import prefix_tree
from dyncp.masks.shared_question import shared_question
from dyncp.masks.sliding_window import sliding_window
from dyncp.masks.stretches import count_gaps, find_stretches
from dyncp.masks.within import within

# What they are called in attention-gym, in prefix-sharing inference and in StreamingLLM.
document = document_packed
shared_prefix = shared_question
streaming_llm = lambda_shaped

__all__ = [
    "ALIASES",
    "BUILTIN",
    "LinearRanges",
    "Mask",
    "MaskFunction",
    "NamedMasks",
    "block_causal",
    "by_name",
    "causal",
    "causal_blockwise",
    "count_batch_tile_pairs",
    "count_gaps",
    "count_tile_pairs",
    "document",
    "document_packed",
    "find_runs",
    "find_stretches",
    "from_mask_mod",
    "full",
    "global_sliding",
    "join_ranges",
    "lambda_shaped",
    "list_tiles",
    "mask_function",
    "named",
    "positions_and_targets",
    "prefix_lm",
    "prefix_tree",
    "shared_prefix",
    "shared_question",
    "sliding_window",
    "streaming_llm",
    "within",
]

BUILTIN: dict[str, ParametricMask] = {
    function.__name__: function
    for function in (
        causal,
        full,
        sliding_window,
        lambda_shaped,
        causal_blockwise,
        shared_question,
        prefix_lm,
        document_packed,
        global_sliding,
        block_causal,
        prefix_tree,
    )
}

ALIASES: dict[str, ParametricMask] = {
    "document": document,
    "shared_prefix": shared_prefix,
    "streaming_llm": streaming_llm,
}


def by_name(text: str) -> MaskFunction:
    """The mask function written as `name` or `name:key=value,key=value`.

    by_name("sliding_window:window=512")              masks.sliding_window(window=512)
    by_name("document:documents=3+5,causal=false")    masks.document_packed(documents=[3, 5], ...)
    """
    name, colon, rest = text.partition(":")
    choices = BUILTIN | ALIASES
    if name.strip() not in choices:
        raise ValueError(f"there is no mask {name.strip()!r}; choices: {', '.join(choices)}")
    function = choices[name.strip()]
    return function.with_parameters(_parse_parameters(text, rest)) if colon else function


def _parse_parameters(text: str, rest: str) -> dict[str, int | bool | list[int]]:
    parameters = {}
    for part in rest.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f"mask {text!r}: {part!r} is not key=value")
        if key in parameters:
            raise ValueError(f"mask {text!r}: {key} is given twice")
        parameters[key] = _parse_value(text, key, value)
    return parameters


def _parse_value(text: str, key: str, value: str) -> int | bool | list[int]:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        numbers = [int(number) for number in value.split("+")]
    except ValueError:
        raise ValueError(
            f"mask {text!r}: {key} is {value!r}; it must be an integer, a list such as 3+5, "
            "true or false"
        ) from None
    return numbers if "+" in value else numbers[0]
