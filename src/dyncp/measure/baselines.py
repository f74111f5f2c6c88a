"""The same attention by other implementations: torch's SDPA and FlexAttention, flash-attn-4.

Each takes a mask case and gives a function of q, k, v, or raises Unavailable with the reason.
"""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dyncp.blocks import AttentionShape
from dyncp.measure.implementation import Attend, Unavailable
from dyncp.measure.mask_cases import MaskCase

# A dense mask has a number for every pair: more tokens than this are not worth their memory.
MOST_MASKED_TOKENS = 8192

Build = Callable[[MaskCase, AttentionShape, torch.device], Attend]


def heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, dim] as [1, heads, tokens, dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def rows_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def _sdpa(backends: list[SDPBackend], **options: Any) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            query, key, value = (heads_first(x) for x in (q, k, v))
            out = scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
            return rows_first(out)

    return attend


def _plain_sdpa(backend: SDPBackend) -> Build:
    def build(case: MaskCase, _shape: AttentionShape, device: torch.device) -> Attend:
        if not case.plain:
            raise Unavailable("only causal and full masks")
        if backend is SDPBackend.CUDNN_ATTENTION and device.type != "cuda":
            raise Unavailable("cuDNN runs on CUDA GPUs only")
        return _sdpa([backend], is_causal=case.causal)

    return build


def sdpa_mask(case: MaskCase, _shape: AttentionShape, device: torch.device) -> Attend:
    """SDPA with the mask as a dense matrix: every pair is computed."""
    if case.plain:
        raise Unavailable("causal and full masks need no matrix")
    if case.tokens > MOST_MASKED_TOKENS:
        raise Unavailable(f"a dense mask of more than {MOST_MASKED_TOKENS:,} tokens is not tried")
    ranges = torch.from_numpy(case.ranges()).to(device)
    key = torch.arange(case.tokens, device=device)
    allowed = torch.zeros(case.tokens, case.tokens, dtype=torch.bool, device=device)
    for column in range(ranges.shape[1]):
        allowed |= (key >= ranges[:, column, :1]) & (key < ranges[:, column, 1:])
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return _sdpa(backends, attn_mask=allowed)


def flex(case: MaskCase, _shape: AttentionShape, device: torch.device) -> Attend:
    """FlexAttention, compiled for this mask and length."""
    if device.type != "cuda":
        raise Unavailable("FlexAttention has no backward on CPUs")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # every mask is a program of its own; else the limit of programs is met
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    tokens, block_mask = case.tokens, None
    if case.name != "full":
        block_mask = create_block_mask(
            _mask_mod(case, device), None, None, tokens, tokens, device=device
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = map(heads_first, (q, k, v))
        return rows_first(compiled(*heads, block_mask=block_mask, enable_gqa=True))

    return attend


def _mask_mod(case: MaskCase, device: torch.device) -> Callable[..., Tensor]:
    """Causal by index, documents by their numbers, anything else by key ranges."""
    if case.documents:
        lengths = torch.tensor(case.batch.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        return lambda b, h, q, k: (q >= k) & (document[q] == document[k])  # noqa: ARG005
    if case.causal:
        return lambda b, h, q, k: q >= k  # noqa: ARG005
    ranges = torch.from_numpy(case.ranges()).to(device)
    first, last = ranges.unbind(-1)
    columns = ranges.shape[1]

    def in_ranges(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = (k >= first[q, 0]) & (k < last[q, 0])
        for column in range(1, columns):
            allowed = allowed | ((k >= first[q, column]) & (k < last[q, column]))
        return allowed

    return in_ranges


def find_flash_attn_4(device: torch.device) -> Any:
    """flash-attn-4's module, where it is installed and can run."""
    if device.type != "cuda":
        raise Unavailable("flash-attn-4 runs on CUDA GPUs only")
    try:
        return import_module("flash_attn.cute")
    except ImportError as error:
        raise Unavailable(f"flash-attn-4 is not installed ({error})") from error


def flash_attn_4(case: MaskCase, _shape: AttentionShape, device: torch.device) -> Attend:
    """flash-attn-4's own masks: causal, full, and causal documents."""
    flash = find_flash_attn_4(device)
    if case.documents:
        offsets = case.batch.offsets.tolist()
        return varlen(flash.flash_attn_varlen_func, offsets, offsets, device)
    if not case.plain:
        raise Unavailable("no mask of this kind built in")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.unsqueeze(0) for x in (q, k, v))
        return _output(flash.flash_attn_func(*rows, causal=case.causal))[0]

    return attend


def varlen(function: Any, rows: Sequence[int], keys: Sequence[int], device: torch.device) -> Attend:
    """flash-attn-4's function for causal documents, whose rows and keys begin and end at these
    offsets. A document's last row attends its last key."""
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {"causal": True}
    for side, offsets in (("q", rows), ("k", keys)):
        options[f"cu_seqlens_{side}"] = torch.tensor(offsets, dtype=torch.int32, device=device)
        if f"max_seqlen_{side}" in known:
            options[f"max_seqlen_{side}"] = max(end - start for start, end in pairwise(offsets))
    return lambda q, k, v: _output(function(q, k, v, **options))


def _output(result: Any) -> Tensor:
    """The output, where log-sum-exps come along too."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


BASELINES: dict[str, Build] = {
    "sdpa_flash": _plain_sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": _plain_sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa_mask": sdpa_mask,
    "flex": flex,
    "flash_attn_4": flash_attn_4,
}
