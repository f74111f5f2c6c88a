"""Flash-attn-4's compiled kernels, found by one ordinary call each and called directly afterwards.

An ordinary call takes 160 to 220 µs of host time for its checks and its compile key. The compiled
kernel behind it takes tensors of any size, so we keep it by what it was compiled for.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from flash_attn.cute import flash_bwd_sm90, flash_fwd_sm90, interface
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.utils import AuxData
from torch import Tensor

from dyncp.kernels.flash4.range_mask import RangeMask, by_ranges
from dyncp.kernels.flash4.tile_order import FirstTilesFirst, LastTilesFirst
from dyncp.kernels.tile_lists import SIDE

Compiled = Callable[..., None]
# Rows up to which flash-attn-4 has a single piece of queries backward: its largest.
MOST_SINGLE = 128


@dataclass(frozen=True, eq=False)
class SparseLists:
    """Tile lists as flash-attn-4 takes them: counts [tiles] and indices [tiles, most], partial and
    full; of query tiles with ranges of key rows forward, of key tiles with ranges of query rows
    backward."""

    partial_count: Tensor
    partial: Tensor
    full_count: Tensor
    full: Tensor
    ranges: Tensor  # int32[2 × ranges, rows of whole tiles]
    by_heads: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict, init=False)

    def tensors(self, heads: int) -> tuple[Tensor | None, ...]:
        """[1, heads, tiles(, most)], the same lists for every head; and four that we do not use."""
        if heads not in self.by_heads:
            given = (self.partial_count, self.partial, self.full_count, self.full)
            lists = [x[None, None].expand(1, heads, *x.shape) for x in given]
            self.by_heads[heads] = (*lists, None, None, None, None)
        return self.by_heads[heads]


@dataclass(frozen=True, eq=False)
class Varlen:
    """Whole sequences below each other, each causal: int32[sequences + 1] of rows."""

    q_starts: Tensor
    k_starts: Tensor


Shape = SparseLists | Varlen | None  # None: causal, from the first row to the last

_compiling = Lock()  # what is replaced meanwhile is flash-attn-4's
_forward: dict[Any, Compiled] = {}
_backward: dict[Any, Compiled] = {}


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, shape: Shape, out: Tensor, lse: Tensor
) -> None:
    """q, out: [rows, heads, dim]; lse: [heads, rows]. Rows that attend nothing get 0 and −∞."""
    key = (q.device, q.dtype, q.shape[1:], k.shape[1], _kind(shape), _single(q, k))
    if key not in _forward:
        _forward[key] = _compile_forward(q, k, v, scale, shape, out, lse)
        return
    q_starts, k_starts = _starts(shape)
    lists, aux = _lists(shape, q.shape[1])
    tensors = [x if q_starts is not None else x.unsqueeze(0) for x in (q, k, v, out, lse)]
    _forward[key](*tensors, scale, q_starts, k_starts, *(None,) * 6, lists, aux, None, None)


def _compile_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, shape: Shape, out: Tensor, lse: Tensor
) -> Compiled:
    options: dict[str, Any] = {"softmax_scale": scale, "return_lse": True}
    if isinstance(shape, Varlen):
        options |= {"cu_seqlens_q": shape.q_starts, "cu_seqlens_k": shape.k_starts}
    else:
        q, k, v, out, lse = (x.unsqueeze(0) for x in (q, k, v, out, lse))
    options |= _options(shape, q.shape[-2])
    with _compiling, _over_lists(shape), _watch(interface._flash_attn_fwd) as seen:
        interface._flash_attn_fwd(q, k, v, out=out, lse=lse, **options)
    compiled: Compiled = seen[-1]
    return compiled


@contextmanager
def _over_lists(shape: Shape) -> Any:
    """Kernels over tile lists that are compiled inside have our mask and our order of tiles."""
    if not isinstance(shape, SparseLists):
        yield
        return
    orders = {flash_fwd_sm90: LastTilesFirst, flash_bwd_sm90: FirstTilesFirst}
    kept = {module: (module.AttentionMask, module.SingleTileScheduler) for module in orders}
    for module, order in orders.items():
        module.AttentionMask, module.SingleTileScheduler = RangeMask, order
    try:
        yield
    finally:
        for module, names in kept.items():
            module.AttentionMask, module.SingleTileScheduler = names


@contextmanager
def _watch(function: Any) -> Any:
    """Lists the compiled kernels that `function` takes from its cache."""
    cache, seen = function.compile_cache, []

    class Watched:
        def __contains__(self, key: Any) -> bool:
            return key in cache

        def __setitem__(self, key: Any, value: Compiled) -> None:
            cache[key] = value

        def __getitem__(self, key: Any) -> Compiled:
            kernel: Compiled = cache[key]
            seen.append(kernel)
            return kernel

    function.compile_cache = Watched()
    try:
        yield seen
    finally:
        function.compile_cache = cache


def _kind(shape: Shape) -> str:
    if isinstance(shape, SparseLists):
        return "lists"
    return "causal" if shape is None else "varlen"


def _single(q: Tensor, k: Tensor) -> tuple[bool, bool]:
    """Flash-attn-4 compiles calls of one query piece or one key piece apart."""
    return len(q) <= (64 if q.shape[2] > 64 else MOST_SINGLE), len(k) <= SIDE


def _starts(shape: Shape) -> tuple[Tensor | None, Tensor | None]:
    return (shape.q_starts, shape.k_starts) if isinstance(shape, Varlen) else (None, None)


def _options(shape: Shape, heads: int) -> dict[str, Any]:
    if not isinstance(shape, SparseLists):
        return {"causal": True}
    lists = BlockSparseTensorsTorch(*shape.tensors(heads)[:4], block_size=(SIDE, SIDE))
    return {"mask_mod": by_ranges, "aux_tensors": [shape.ranges], "block_sparse_tensors": lists}


def _lists(shape: Shape, heads: int) -> tuple[Any, AuxData]:
    if isinstance(shape, SparseLists):
        return shape.tensors(heads), AuxData([shape.ranges], None)
    return None, AuxData(None, None)


@dataclass(frozen=True, eq=False)
class Accumulators:
    """Flash-attn-4's own gradient sums, fp32: dq [q heads, rows × dim], dk and dv [kv heads, rows ×
    dim], in the order of its own pieces; rows are padded to whole tiles."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def attend_backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    scale: float,
    shape: Shape,
    sums: Accumulators,
) -> None:
    """Adds to `sums`. lse_log2 and delta: [heads, rows padded to 64]; rows that attend nothing have
    lse 0, rows behind the last have +∞."""
    q, k, v = inputs
    main = _backward_kernel(q, k, shape)
    q_starts, k_starts = _starts(shape)
    lists, aux = _lists(shape, q.shape[1])
    tensors: tuple[Tensor, ...] = (q, k, v, dout, lse_log2, delta, sums.dq, sums.dk, sums.dv)
    if q_starts is None:
        tensors = tuple(x.unsqueeze(0) for x in tensors)
    main(*tensors, scale, q_starts, k_starts, *(None,) * 7, aux, lists, None)


def _backward_kernel(q: Tensor, k: Tensor, shape: Shape) -> Compiled:
    key = (q.device, q.dtype, q.shape[1:], k.shape[1], _kind(shape), _single(q, k))
    if key not in _backward:
        _backward[key] = _compile_backward(q, k, shape)
    return _backward[key]


def _compile_backward(q: Tensor, k: Tensor, shape: Shape) -> Compiled:
    """One ordinary call whose results nobody needs."""
    options = _options(shape, q.shape[1])
    out, dout = torch.zeros_like(q), torch.zeros_like(q)
    lse = torch.zeros(q.shape[1], len(q), device=q.device)
    tensors: tuple[Tensor, ...] = (q, k, k, out, dout, lse)
    if isinstance(shape, Varlen):
        options |= {"cu_seqlens_q": shape.q_starts, "cu_seqlens_k": shape.k_starts}
    else:
        tensors = tuple(x.unsqueeze(0) for x in tensors)
    with _compiling, _over_lists(shape), _watch(interface._flash_attn_bwd) as seen:
        interface._flash_attn_bwd(*tensors, **options)
    compiled: Compiled = seen[-1]
    return compiled
