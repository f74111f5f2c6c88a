"""Flash-attn-4's compiled kernels: each is found by one ordinary call and then called directly.

An ordinary call takes 160 to 220 µs of host time for its checks and its compile key. The compiled
kernel inside takes tensors of any size, so we keep it by what it was compiled for.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from flash_attn.cute import flash_bwd_sm90, flash_fwd_sm90, interface
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.utils import AuxData
from torch import Tensor

from dyncp.kernels.flash4_mask import FirstTilesFirst, LastTilesFirst, RangeMask, by_ranges
from dyncp.kernels.kernel import Index
from dyncp.kernels.tile_lists import SIDE

Compiled = Callable[..., None]
# Query rows of the largest kernel tile in flash-attn-4's backward: longer calls have several tiles.
MOST_SINGLE = 128


@dataclass(frozen=True, eq=False)
class SparseLists:
    """Tile lists in flash-attn-4's form: counts [tiles] and indices [tiles, most] of partial and of
    full tiles. Forward lists are by query tile, with ranges of key rows; backward lists are by key
    tile, with ranges of query rows."""

    partial_count: Index
    partial: Index
    full_count: Index
    full: Index
    ranges: Index  # int32[2 × ranges, rows of whole tiles]
    by_heads: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict, init=False)

    def tensors(self, heads: int) -> tuple[Tensor | None, ...]:
        """The lists as [1, heads, tiles(, most)], the same for every head, and None for four lists
        that we do not use."""
        if heads not in self.by_heads:
            given = (self.partial_count, self.partial, self.full_count, self.full)
            lists = [x.tensor[None, None].expand(1, heads, *x.tensor.shape) for x in given]
            self.by_heads[heads] = (*lists, None, None, None, None)
        return self.by_heads[heads]


@dataclass(frozen=True, eq=False)
class Varlen:
    """Several causal sequences: the first row of each, and the end of the last,
    int32[sequences + 1]."""

    q_starts: Index
    k_starts: Index


Shape = SparseLists | Varlen | None  # None: one causal sequence of all rows

_compiling = Lock()  # held while classes of flash-attn-4 are replaced
_forward: dict[Any, Compiled] = {}
_backward: dict[Any, Compiled] = {}


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, shape: Shape, out: Tensor, lse: Tensor
) -> None:
    """q, out: [rows, heads, dim]; lse: [heads, rows]. Rows that attend nothing get 0 and −∞."""
    key = _key(q, k, shape)
    tensors = _batched((q, k, v, out, lse), shape)
    if key not in _forward:
        options = {"softmax_scale": scale, "return_lse": True, "out": tensors[3], "lse": tensors[4]}
        _forward[key] = _compile(interface._flash_attn_fwd, tensors[:3], shape, **options)
        return
    q_starts, k_starts = _starts(shape)
    lists, aux = _lists(shape, q.shape[1])
    _forward[key](*tensors, scale, q_starts, k_starts, *(None,) * 6, lists, aux, None, None)


def _compile(function: Any, tensors: Sequence[Tensor], shape: Shape, **options: Any) -> Compiled:
    """Makes an ordinary call of flash-attn-4's function and returns the kernel that it compiled."""
    options |= _options(shape, tensors[0].shape[-2])
    with _compiling, _over_lists(shape), _watch(function) as seen:
        function(*tensors, **options)
    compiled: Compiled = seen[-1]
    return compiled


def _batched(tensors: tuple[Tensor, ...], shape: Shape) -> tuple[Tensor, ...]:
    """Adds a batch axis of size 1, except for varlen calls, which have none."""
    return tensors if isinstance(shape, Varlen) else tuple(x.unsqueeze(0) for x in tensors)


@contextmanager
def _over_lists(shape: Shape) -> Any:
    """Inside this context, kernels over tile lists are compiled with our mask and tile order."""
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
    """Yields a list that collects the compiled kernels that `function` reads from its cache."""
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


def _key(q: Tensor, k: Tensor, shape: Shape) -> tuple[Any, ...]:
    """Everything that flash-attn-4 compiles separate kernels for."""
    return q.device, q.dtype, q.shape[1:], k.shape[1], *variant_of(q, k, shape)


def variant_of(q: Tensor, k: Tensor, shape: Shape) -> tuple[str, bool, bool]:
    """The path of flash-attn-4 that a call uses, whether it has a single query tile, and whether it
    has a single key tile. Flash-attn-4 compiles a separate kernel for each."""
    kind = {SparseLists: "lists", Varlen: "varlen"}.get(type(shape), "causal")
    return kind, len(q) <= (64 if q.shape[2] > 64 else MOST_SINGLE), len(k) <= SIDE


def _starts(shape: Shape) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(shape, Varlen):
        return shape.q_starts.tensor, shape.k_starts.tensor
    return None, None


def _options(shape: Shape, heads: int) -> dict[str, Any]:
    if isinstance(shape, SparseLists):
        lists = BlockSparseTensorsTorch(*shape.tensors(heads)[:4], block_size=(SIDE, SIDE))
        ranges = [shape.ranges.tensor]
        return {"mask_mod": by_ranges, "aux_tensors": ranges, "block_sparse_tensors": lists}
    if shape is None:
        return {"causal": True}
    q_starts, k_starts = _starts(shape)
    return {"causal": True, "cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts}


def _lists(shape: Shape, heads: int) -> tuple[Any, AuxData]:
    if isinstance(shape, SparseLists):
        return shape.tensors(heads), AuxData([shape.ranges.tensor], None)
    return None, AuxData(None, None)


def attend_backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    scale: float,
    shape: Shape,
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds gradients to `sums` in fp32: dq [q heads, rows × dim], dk and dv [kv heads, rows × dim],
    in panels (`row_ops.panels_to_rows`) with rows padded to whole tiles. lse_log2 and delta are
    [heads, rows padded to 64]. Rows that attend nothing have lse 0, rows after the last have +∞."""
    q, k, _ = inputs
    key = _key(q, k, shape)
    if key not in _backward:
        _backward[key] = _compile_backward(q, k, shape)
    q_starts, k_starts = _starts(shape)
    lists, aux = _lists(shape, q.shape[1])
    tensors = _batched((*inputs, dout, lse_log2, delta, *sums), shape)
    _backward[key](*tensors, scale, q_starts, k_starts, *(None,) * 7, aux, lists, None)


def _compile_backward(q: Tensor, k: Tensor, shape: Shape) -> Compiled:
    """Compiles by an ordinary call, and drops its results."""
    out, dout = torch.zeros_like(q), torch.zeros_like(q)
    lse = torch.zeros(q.shape[1], len(q), device=q.device)
    tensors = _batched((q, k, k, out, dout, lse), shape)
    return _compile(interface._flash_attn_bwd, tensors, shape)
