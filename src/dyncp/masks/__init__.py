"""Masks: which keys each query token of a sequence may attend.

`masks.causal(4096)` is a mask. `masks.causal` itself is a mask function: it takes a length or a
sample and returns a mask. Every mask function imported here is built in, so it is listed in
`masks.BUILTIN` and found by `by_name`.
"""

from dyncp.masks.block_causal import block_causal as block_causal
from dyncp.masks.causal import causal as causal
from dyncp.masks.causal_blockwise import causal_blockwise as causal_blockwise
from dyncp.masks.document_packed import document_packed as document_packed
from dyncp.masks.full import full as full
from dyncp.masks.function import MaskFunction as MaskFunction
from dyncp.masks.function import NamedMasks as NamedMasks
from dyncp.masks.function import ParametricMask
from dyncp.masks.function import from_mask_mod as from_mask_mod
from dyncp.masks.function import mask_function as mask_function
from dyncp.masks.function import named as named
from dyncp.masks.global_sliding import global_sliding as global_sliding
from dyncp.masks.lambda_shaped import lambda_shaped as lambda_shaped
from dyncp.masks.mask import Mask as Mask
from dyncp.masks.mask import positions_and_targets as positions_and_targets
from dyncp.masks.pairs import LinearRanges as LinearRanges
from dyncp.masks.pairs import count_batch_tile_pairs as count_batch_tile_pairs
from dyncp.masks.pairs import count_tile_pairs as count_tile_pairs
from dyncp.masks.pairs import find_runs as find_runs
from dyncp.masks.pairs import list_tiles as list_tiles
from dyncp.masks.positions import find_stretches as find_stretches
from dyncp.masks.positions import single_stretches as single_stretches
from dyncp.masks.positions import window_of as window_of
from dyncp.masks.positions import windows_of as windows_of
from dyncp.masks.positions import within as within
from dyncp.masks.prefix_lm import prefix_lm as prefix_lm
from dyncp.masks.prefix_tree import prefix_tree as prefix_tree
from dyncp.masks.shared_question import shared_question as shared_question
from dyncp.masks.sliding_window import sliding_window as sliding_window
from dyncp.masks.targets import own_labels as own_labels
from dyncp.masks.targets import sees_target as sees_target

BUILTIN: dict[str, ParametricMask] = {
    name: value for name, value in globals().items() if isinstance(value, ParametricMask)
}

# The same masks under their names in attention-gym, prefix-sharing inference and StreamingLLM.
document = document_packed
shared_prefix = shared_question
streaming_llm = lambda_shaped

ALIASES: dict[str, ParametricMask] = {
    "document": document,
    "shared_prefix": shared_prefix,
    "streaming_llm": streaming_llm,
}

# The names for users. The other names imported here are for the later stages.
__all__ = [
    "Mask",
    "MaskFunction",
    "NamedMasks",
    "by_name",
    "from_mask_mod",
    "mask_function",
    "named",
    "own_labels",
    "positions_and_targets",
    "within",
]
__all__.extend(BUILTIN | ALIASES)


def by_name(text: str) -> MaskFunction:
    """Parses a mask function written as `name` or `name:key=value,key=value`.

    by_name("sliding_window:window=512")              masks.sliding_window(window=512)
    by_name("document:documents=3+5,causal=false")    masks.document_packed(documents=[3, 5], ...)
    """
    name, colon, rest = (piece.strip() for piece in text.partition(":"))
    choices = BUILTIN | ALIASES
    if name not in choices:
        raise ValueError(f"there is no mask {name!r}; choices: {', '.join(choices)}")
    parameters: dict[str, int | bool | list[int]] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f"mask {text!r}: {part!r} is not key=value")
        if key in parameters:
            raise ValueError(f"mask {text!r}: {key} is given twice")
        parameters[key] = _parse_value(text, key, value)
    return choices[name](**parameters)


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
