"""Plain flash-attention over whole documents: what a rank without a plan would call."""

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dyncp.blocks import AttentionShape
from dyncp.measure.baselines import find_flash_attn_4, heads_first, rows_first, varlen
from dyncp.measure.equal_pairs import WholeDocuments
from dyncp.measure.implementation import Attend, Unavailable
from dyncp.measure.inputs import DTYPES

# A dense mask takes a byte per pair: more are not worth their memory.
MOST_MASKED_PAIRS = 1 << 30


def plain_attention(device: torch.device) -> str:
    """The implementation that is taken here: flash-attn-4 where it is installed, else SDPA."""
    try:
        find_flash_attn_4(device)
    except Unavailable:
        return "sdpa"
    return "flash_attn_4"


def attend_whole(documents: WholeDocuments, shape: AttentionShape, device: torch.device) -> Attend:
    """All documents in one call of flash-attn-4, or document by document. Keys before the rows are
    made up, and their gradients computed."""
    if plain_attention(device) == "sdpa":
        attend = _by_sdpa(documents, device)
    else:
        rows = tuple(accumulate(documents.lengths, initial=0))
        keys = (0, documents.before + documents.tokens) if documents.before else rows
        function = find_flash_attn_4(device).flash_attn_varlen_func
        attend = varlen(function, rows, keys, device)
    return _with_keys_before(attend, documents.before, shape, device)


def _with_keys_before(
    attend: Attend, before: int, shape: AttentionShape, device: torch.device
) -> Attend:
    if not before:
        return attend
    size = before, shape.kv_heads, shape.head_dim
    made_up = torch.randn(2, *size, device=device).to(DTYPES[shape.dtype])

    def with_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, torch.cat([made_up[0], k]), torch.cat([made_up[1], v]))

    return with_keys


def _by_sdpa(documents: WholeDocuments, device: torch.device) -> Attend:
    if documents.before:
        return _after_others(documents, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cut = (torch.split(x, list(documents.lengths)) for x in (q, k, v))
        return torch.cat([_sdpa(*rows, is_causal=True) for rows in zip(*cut, strict=True)])

    return attend


def _after_others(documents: WholeDocuments, device: torch.device) -> Attend:
    """SDPA counts causal rows from the first key, so these need their mask."""
    rows, keys = documents.tokens, documents.before + documents.tokens
    if rows * keys > MOST_MASKED_PAIRS:
        raise Unavailable(
            f"{rows:,} tokens after {documents.before:,} need flash-attn-4: torch's SDPA would "
            "take a dense mask"
        )
    allowed = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(documents.before)
    return lambda q, k, v: _sdpa(q, k, v, attn_mask=allowed)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    query, key, value = (heads_first(x) for x in (q, k, v))
    out = scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)  # type: ignore[arg-type]
    return rows_first(out)
