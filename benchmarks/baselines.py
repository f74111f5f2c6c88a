"""The same attention by other implementations: torch's SDPA and FlexAttention, flash-attn-4, and
dense attention in fp64 as the reference.

`BASELINES` run the masks of `bench kernels`; `attend_whole` runs the whole documents that `bench
layers` compares a rank with. Both raise Unavailable, with the reason, if they cannot run here.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dyncp.blocks import DEFAULT_MASK, AttentionShape, Batch
from dyncp.calibrate.calls import DTYPES, Attend, Inputs, OutAndGrads, Unavailable, batch_of

# Masks that other kernels have built in: one causal or full sequence, and causal documents.
PLAIN, DOCUMENTS = ("causal", "full"), "document_causal"
# A dense mask takes a byte per pair, so larger ones are not tried.
MOST_MASKED_TOKENS, MOST_MASKED_PAIRS = 8192, 1 << 30
# Dense attention computes chunks of rows with at most so many scores over all heads: 512 MiB.
CHUNK_SCORES = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class MaskCase:
    """A batch, and the name of its mask."""

    name: str
    batch: Batch

    @property
    def tokens(self) -> int:
        return self.batch.num_tokens

    @property
    def num_pairs(self) -> int:
        return sum(mask.num_pairs for mask in self.batch.masks[DEFAULT_MASK])


def mask_case(name: str, tokens: int) -> MaskCase:
    """A batch of `tokens` tokens with the mask called `name`."""
    return MaskCase(name, batch_of(name, tokens))


Build = Callable[[MaskCase, torch.device], Attend]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's SDPA on tensors [tokens, heads, dim]."""
    query, key, value = (heads_first(x) for x in (q, k, v))
    return rows_first(scaled_dot_product_attention(query, key, value, enable_gqa=True, **options))


def heads_first(x: Tensor) -> Tensor:
    """[tokens, heads, dim] as [1, heads, tokens, dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def rows_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def _with_backends(backends: list[SDPBackend], **options: Any) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends):
            return sdpa(q, k, v, **options)

    return attend


def sdpa_plain(backend: SDPBackend) -> Build:
    """SDPA with this backend."""

    def build(case: MaskCase, device: torch.device) -> Attend:
        if case.name not in PLAIN:
            raise Unavailable("only causal and full masks")
        if backend is SDPBackend.CUDNN_ATTENTION and device.type != "cuda":
            raise Unavailable("cuDNN runs on CUDA GPUs only")
        return _with_backends([backend], is_causal=case.name == "causal")

    return build


def sdpa_mask(case: MaskCase, device: torch.device) -> Attend:
    """SDPA with the mask as a dense matrix: every pair is computed."""
    if case.name in PLAIN:
        raise Unavailable("causal and full masks need no matrix")
    if case.tokens > MOST_MASKED_TOKENS:
        raise Unavailable(f"a dense mask of more than {MOST_MASKED_TOKENS:,} tokens is not tried")
    ranges = key_ranges(case, device)
    key = torch.arange(case.tokens, device=device)
    allowed = torch.zeros(case.tokens, case.tokens, dtype=torch.bool, device=device)
    for column in range(ranges.shape[1]):
        allowed |= (key >= ranges[:, column, :1]) & (key < ranges[:, column, 1:])
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return _with_backends(backends, attn_mask=allowed)


def key_ranges(case: MaskCase, device: torch.device) -> Tensor:
    """Key ranges of every token, as indices into the batch: int32 [tokens, R, 2]."""
    every = case.batch.masks[DEFAULT_MASK]
    ranges = np.zeros((case.tokens, max(mask.ranges.shape[1] for mask in every), 2), np.int32)
    for mask, first in zip(every, case.batch.offsets[:-1].tolist(), strict=True):
        rows = slice(first, first + mask.length)
        ranges[rows, : mask.ranges.shape[1]] = mask.ranges + first
    return torch.from_numpy(ranges).to(device)


def flex(case: MaskCase, device: torch.device) -> Attend:
    """FlexAttention, compiled for this mask and length."""
    if device.type != "cuda":
        raise Unavailable("FlexAttention has no backward on CPUs")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # every mask compiles a new program, which would exceed dynamo's limit
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    tokens, block_mask = case.tokens, None
    if case.name != "full":
        block_mask = create_block_mask(
            mask_mod(case, device), None, None, tokens, tokens, device=device
        )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = map(heads_first, (q, k, v))
        return rows_first(compiled(*heads, block_mask=block_mask, enable_gqa=True))

    return attend


def mask_mod(case: MaskCase, device: torch.device) -> Callable[..., Tensor]:
    """FlexAttention's mask function: causal by index, documents by their numbers, other masks by
    key ranges."""
    if case.name == DOCUMENTS:
        lengths = torch.tensor(case.batch.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        return lambda b, h, q, k: (q >= k) & (document[q] == document[k])  # noqa: ARG005
    if case.name == "causal":
        return lambda b, h, q, k: q >= k  # noqa: ARG005
    ranges = key_ranges(case, device)
    first, last = ranges.unbind(-1)
    columns = ranges.shape[1]

    def in_ranges(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = (k >= first[q, 0]) & (k < last[q, 0])
        for column in range(1, columns):
            allowed = allowed | ((k >= first[q, column]) & (k < last[q, column]))
        return allowed

    return in_ranges


def find_flash_attn_4(device: torch.device) -> Any:
    """flash-attn-4's module."""
    if device.type != "cuda":
        raise Unavailable("flash-attn-4 runs on CUDA GPUs only")
    try:
        return import_module("flash_attn.cute")
    except ImportError as error:
        raise Unavailable(f"flash-attn-4 is not installed ({error})") from error


def flash_attn_4(case: MaskCase, device: torch.device) -> Attend:
    """flash-attn-4's own masks: causal, full, and causal documents."""
    flash = find_flash_attn_4(device)
    if case.name == DOCUMENTS:
        offsets = case.batch.offsets.tolist()
        return varlen(flash.flash_attn_varlen_func, offsets, offsets, device)
    if case.name not in PLAIN:
        raise Unavailable("no mask of this kind built in")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.unsqueeze(0) for x in (q, k, v))
        return _output(flash.flash_attn_func(*rows, causal=case.name == "causal"))[0]

    return attend


def varlen(function: Any, rows: Sequence[int], keys: Sequence[int], device: torch.device) -> Attend:
    """Calls flash-attn-4's function for causal documents with these offsets of rows and keys. The
    last row of a document attends its last key."""
    known = inspect.signature(function).parameters
    options: dict[str, Any] = {"causal": True}
    for side, offsets in (("q", rows), ("k", keys)):
        options[f"cu_seqlens_{side}"] = torch.tensor(offsets, dtype=torch.int32, device=device)
        if f"max_seqlen_{side}" in known:
            options[f"max_seqlen_{side}"] = max(end - start for start, end in pairwise(offsets))
    return lambda q, k, v: _output(function(q, k, v, **options))


def _output(result: Any) -> Tensor:
    """The output of a call that may also return log-sum-exps."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out


BASELINES: dict[str, Build] = {
    "sdpa_flash": sdpa_plain(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": sdpa_plain(SDPBackend.CUDNN_ATTENTION),
    "sdpa_mask": sdpa_mask,
    "flex": flex,
    "flash_attn_4": flash_attn_4,
}


@dataclass(frozen=True, slots=True)
class WholeDocuments:
    """Causal documents. If `before` is not 0, there is one document, preceded by `before` tokens
    that are only keys: a rank's rows may attend more keys than it has tokens."""

    lengths: tuple[int, ...]
    before: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Pairs of one head."""
        return _pairs(self.lengths) + self.before * self.tokens

    def __str__(self) -> str:
        """ "3 × 100 + 20", or "4,096 after 9,000"."""
        if self.before:
            return f"{self.tokens:,} after {self.before:,}"
        longest = self.lengths[0]
        count = self.lengths.count(longest)
        rest = f" + {self.lengths[-1]:,}" if count < len(self.lengths) else ""
        return f"{count} × {longest:,}{rest}"


def equal_pairs(tokens: int, pairs: int) -> WholeDocuments:
    """Documents of equal length (the last may be shorter), with `tokens` tokens and about `pairs`
    pairs. If one document has too few pairs, it is preceded by tokens that are only keys.

    8 tokens and 24 pairs give documents of 6 and 2 tokens (21 + 3 pairs). 8 tokens have at most 36
    pairs, so 52 pairs give 8 tokens after 2 others (36 + 8 × 2)."""
    if tokens < 1 or pairs < 0:
        raise ValueError(
            f"tokens are {tokens} and pairs {pairs}; tokens must be positive and pairs not negative"
        )
    whole = _pairs((tokens,))
    if pairs >= whole:
        return WholeDocuments((tokens,), round((pairs - whole) / tokens))
    # Longer documents always have more pairs, so this is a binary search for the length.
    short, long = 1, tokens
    while long - short > 1:
        middle = (short + long) // 2
        if _pairs(_cut(tokens, middle)) <= pairs:
            short = middle
        else:
            long = middle
    nearest = min((short, long), key=lambda length: abs(_pairs(_cut(tokens, length)) - pairs))
    return WholeDocuments(_cut(tokens, nearest))


def _cut(tokens: int, length: int) -> tuple[int, ...]:
    rest = tokens % length
    return (length,) * (tokens // length) + ((rest,) if rest else ())


def _pairs(lengths: tuple[int, ...]) -> int:
    return sum(length * (length + 1) // 2 for length in lengths)


def plain_attention(device: torch.device) -> str:
    """The implementation of plain attention: flash-attn-4 if it is installed, else SDPA."""
    try:
        find_flash_attn_4(device)
    except Unavailable:
        return "sdpa"
    return "flash_attn_4"


def attend_whole(documents: WholeDocuments, shape: AttentionShape, device: torch.device) -> Attend:
    """Attention over all documents, in one call of flash-attn-4 or document by document. The keys
    before the rows are random; their gradients are computed, too."""
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
    extra = torch.randn(2, *size, device=device).to(DTYPES[shape.dtype])

    def with_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, torch.cat([extra[0], k]), torch.cat([extra[1], v]))

    return with_keys


def _by_sdpa(documents: WholeDocuments, device: torch.device) -> Attend:
    if documents.before:
        return sdpa_after_keys(documents, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cut = (torch.split(x, list(documents.lengths)) for x in (q, k, v))
        return torch.cat([sdpa(*rows, is_causal=True) for rows in zip(*cut, strict=True)])

    return attend


def sdpa_after_keys(documents: WholeDocuments, device: torch.device) -> Attend:
    """SDPA with a dense mask, since its causal mask aligns the first row with the first key."""
    rows, keys = documents.tokens, documents.before + documents.tokens
    if rows * keys > MOST_MASKED_PAIRS:
        raise Unavailable(
            f"{rows:,} tokens after {documents.before:,} need flash-attn-4: torch's SDPA would "
            "take a dense mask"
        )
    allowed = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(documents.before)
    return lambda q, k, v: sdpa(q, k, v, attn_mask=allowed)


def dense_attention(batch: Batch, inputs: Inputs) -> OutAndGrads:
    """Attention of all sequences in fp64, chunk by chunk of query rows; tokens in batch order."""
    q, k, v, dout = (x.detach().double() for x in (*inputs.qkv, inputs.dout))
    found = OutAndGrads(*(torch.zeros_like(x) for x in (q, q, k, v)))
    for start, mask in zip(batch.offsets.tolist(), batch.masks[DEFAULT_MASK], strict=False):
        keys = slice(start, start + mask.length)
        ranges = torch.from_numpy(mask.ranges.copy()).to(q.device)
        chunk = max(1, CHUNK_SCORES // (q.shape[1] * mask.length))
        for first in range(0, mask.length, chunk):
            own = ranges[first : first + chunk]
            rows = slice(start + first, start + first + len(own))
            out, dq, dk, dv = _attend(own, q[rows], k[keys], v[keys], dout[rows])
            found.out[rows], found.dq[rows] = out, dq
            found.dk[keys] += dk
            found.dv[keys] += dv
    return found


def _attend(ranges: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> OutAndGrads:
    """Plain attention over the keys inside `ranges`; rows without keys give 0."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    key = torch.arange(len(k), device=q.device)
    allowed = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(dim=1)
    queries, keys, values = (x.transpose(0, 1) for x in leaves)
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(queries, keys, values, allowed, enable_gqa=True)
    out = out.transpose(0, 1)
    return OutAndGrads(out.detach(), *torch.autograd.grad(out, leaves, dout))
