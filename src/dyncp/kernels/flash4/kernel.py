"""Kernel `flash4`: flash-attn-4 over lists of kernel tiles with ranges of key rows, or its own
causal and varlen paths where a call is just that."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int32, Int64, UInt8
from dyncp.kernels.call import Held, KernelCall, RowStates
from dyncp.kernels.flash4 import compiled as flash
from dyncp.kernels.flash4.rows import merge_partial, scale_rows
from dyncp.kernels.flash4.sequences import Sequences, find_sequences
from dyncp.kernels.index_arrays import Index, IndexArrays
from dyncp.kernels.kernel import Gradients, Sums
from dyncp.kernels.tile_lists import SIDE, list_full_tiles, list_tiles_of, map_kernel_tiles
from dyncp.kernels.triton.kernel import TritonKernel

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
MOST_DIM = 128  # above, its kernel tiles are not 128 × 128
MOST_SEQUENCES = 256  # above, its varlen path wants tables that we do not make


@dataclass(frozen=True, eq=False)
class Lowered:
    """`rows` and `keys` are the kernel tiles that the call touches; lists count from their starts.
    `places` are the rows of flash-attn-4's padded rows (varlen backward)."""

    rows: slice
    keys: slice
    direct: bool  # every row has this one contribution: no partial result
    indices: tuple[Index, ...]  # of the lists or sequences; none: causal
    states: Index
    places: Index | None = None
    made: dict[int, Any] = field(default_factory=dict)

    def shape(self) -> flash.Shape:
        """What flash-attn-4 is told; made once the index arrays are on the device."""
        if 0 not in self.made:
            tensors = [index.tensor for index in self.indices]
            kinds = {0: None, 2: flash.Varlen, 5: flash.SparseLists}
            kind = kinds[len(tensors)]
            self.made[0] = None if kind is None else kind(*tensors)
        made: flash.Shape = self.made[0]
        return made


@dataclass(frozen=True, eq=False)
class Collected:
    """Gradient sums of all calls of a program, and room for log-sum-exps and row sums."""

    q: Tensor
    k: Tensor
    shape: flash.Shape
    sums: flash.Accumulators
    scaled_lse: Tensor  # [heads, padded rows]
    delta: Tensor
    written: tuple[Tensor, Tensor] | None  # dk, dv of one call, where heads are not grouped


class Flash4Kernel:
    """`deterministic` takes the backward of kernel `triton`; otherwise gradients are added up by
    atomics, in any order."""

    name = "flash4"
    rounds_partials = True
    row_multiple = SIDE

    def __init__(self, *, deterministic: bool) -> None:
        self.settles = not deterministic
        self._triton = TritonKernel()

    def refuses(self, dtype: torch.dtype, dim: int) -> str:
        """Why this kernel does not take such inputs; empty if it does."""
        return _why_not(dtype, dim)

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        if backward and not self.settles:
            return self._triton.lower(call, arrays, backward=True)
        sequences = find_sequences(call)
        if sequences is not None and _own_path(sequences, call, backward):
            return _lower_sequences(sequences, call, arrays, backward)
        return _lower_lists(call, arrays, backward)

    def attend(
        self,
        lowered: Lowered,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out: Sums,
        lse: Tensor,
    ) -> None:
        rows, keys = lowered.rows, lowered.keys
        inputs = (_part(q, rows), _part(k, keys), _part(v, keys), scale, lowered.shape())
        if lowered.direct:
            flash.attend(*inputs, _part(out.final, rows), _part(lse, rows).T)
            return
        assert out.partial is not None, "a call that is merged has no room for its partial output"
        first = slice(0, rows.stop - rows.start)
        partial, partial_lse = (_part(x, first) for x in out.partial)
        flash.attend(*inputs, partial, partial_lse.T)
        merge_partial(partial, partial_lse.T, rows.start, lowered.states.tensor, out, lse)

    def attend_backward(
        self,
        lowered: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: Gradients,
    ) -> None:
        if not self.settles:
            self._triton.attend_backward(lowered, inputs, dout, lse, delta, scale, grads)
            return
        own: Collected = grads.own
        rows, keys, (q, k, v) = lowered.rows, lowered.keys, inputs
        places = None if lowered.places is None else lowered.places.tensor
        padded = _padded(rows) if places is None else slice(None)
        scaled_lse, copied_delta = own.scaled_lse[:, padded], own.delta[:, padded]
        scale_rows(_part(lse, rows), _part(delta, rows), places, scaled_lse, copied_delta)
        sums, cut = own.sums, (_part(q, rows), _part(k, keys), _part(v, keys))
        dim = _dim(q)
        parts = [
            x if places is not None else x[:, span.start * dim : _padded(span).stop * dim]
            for x, span in ((sums.dq, rows), (sums.dk, keys), (sums.dv, keys))
        ]
        if own.written is not None:
            parts[1:] = [x[keys] for x in own.written]
        room = flash.Accumulators(*parts)
        flash.attend_backward(
            cut, _part(dout, rows), scaled_lse, copied_delta, scale, lowered.shape(), room
        )
        if own.written is not None:
            sums.dk[keys].add_(own.written[0][keys])
            sums.dv[keys].add_(own.written[1][keys])

    def open_gradients(
        self, calls: list[Lowered], q: Tensor, k: Tensor, take: Callable[[int], Tensor]
    ) -> Collected:
        heads, kv_heads, dim = q.shape[1], k.shape[1], _dim(q)
        q_rows, k_rows = _collected_rows(calls, len(q), len(k))
        shape = calls[0].shape() if calls else None
        dq = take(heads * q_rows * dim).view(heads, q_rows * dim)
        if heads == kv_heads:
            dk, dv = (take(heads * k_rows * dim).view(k_rows, heads, dim) for _ in range(2))
            written: tuple[Tensor, Tensor] | None
            written = (_room_like(k, k_rows, take), _room_like(k, k_rows, take))
        else:
            dk, dv = (take(kv_heads * k_rows * dim).view(kv_heads, k_rows * dim) for _ in range(2))
            written = None
        for sums in (dq, dk, dv):
            sums.zero_()
        scaled_lse, delta = (take(heads * q_rows).view(heads, q_rows) for _ in range(2))
        room = flash.Accumulators(dq, dk, dv)
        return Collected(q, k, shape, room, scaled_lse, delta, written)

    def settle_queries(self, own: Collected, rows: slice, scale: float, dq: Tensor) -> None:
        dim = _dim(own.q)
        varlen = isinstance(own.shape, flash.Varlen)
        part = (
            own.sums.dq if varlen else own.sums.dq[:, rows.start * dim : _padded(rows).stop * dim]
        )
        flash.settle_queries(own.q, own.k, own.shape, part, scale, dq)

    def settle_keys(
        self, own: Collected, rows: slice, scale: float, dk: Tensor, dv: Tensor
    ) -> None:
        if own.written is not None:
            dk.copy_(own.sums.dk[rows])
            dv.copy_(own.sums.dv[rows])
            return
        dim = _dim(own.q)
        varlen = isinstance(own.shape, flash.Varlen)
        for sums, grad, factor in ((own.sums.dk, dk, scale), (own.sums.dv, dv, 1.0)):
            part = sums if varlen else sums[:, rows.start * dim : _padded(rows).stop * dim]
            flash.settle_keys(own.q, own.k, own.shape, part, factor, grad)

    def clear_queries(self, own: Collected, rows: slice) -> None:
        dim = _dim(own.q)
        own.sums.dq[:, rows.start * dim : _padded(rows).stop * dim].zero_()

    def clear_keys(self, own: Collected, rows: slice) -> None:
        dim = _dim(own.q)
        for sums in (own.sums.dk, own.sums.dv):
            if own.written is not None:
                sums[rows].zero_()
            else:
                sums[:, rows.start * dim : _padded(rows).stop * dim].zero_()


def _room_like(k: Tensor, num_rows: int, take: Callable[[int], Tensor]) -> Tensor:
    """[num_rows, heads, dim] of k's dtype, which has two bytes."""
    items = num_rows * k.shape[1] * k.shape[2]
    return take(-(-items // 2)).view(k.dtype)[:items].view(num_rows, *k.shape[1:])


def _own_path(sequences: Sequences, call: KernelCall, backward: bool) -> bool:
    """One causal sequence collects gradients as lists of tiles do; several lie in another order,
    which only a program of one call may use."""
    count = len(sequences.q_starts) - 1
    return count == 1 or (count <= MOST_SEQUENCES and (call.alone or not backward))


def _lower_sequences(
    sequences: Sequences, call: KernelCall, arrays: IndexArrays, backward: bool
) -> Lowered:
    starts = (sequences.q_starts, sequences.k_starts)
    rows, keys = (slice(0, int(x[-1])) for x in starts)
    several = len(sequences.q_starts) > 2
    return Lowered(
        rows,
        keys,
        _direct(call, rows),
        tuple(arrays.add(x) for x in starts) if several else (),
        _add_states(call.q_states, arrays),
        arrays.add(_places(sequences.q_starts)) if several and backward else None,
    )


def _places(starts: Int32) -> Int32:
    """Row of every padded row: a sequence begins at the next multiple of 64 above its start + 64 ×
    its number, -1 between."""
    counts = np.diff(starts)
    number = np.repeat(np.arange(len(counts)), counts)
    first = (starts[:-1] + np.arange(len(counts)) * flash.ROWS) // flash.ROWS * flash.ROWS
    places = np.full(varlen_rows(int(starts[-1]), len(counts), flash.ROWS), -1, np.int32)
    rows = np.arange(starts[-1])
    places[first[number] + rows - starts[number]] = rows
    return places


def varlen_rows(rows: int, sequences: int, side: int) -> int:
    """Padded rows that flash-attn-4 wants for `sequences` below each other."""
    return -(-(rows + (sequences + 1) * side) // side) * side


def _lower_lists(call: KernelCall, arrays: IndexArrays, backward: bool) -> Lowered:
    tiles = map_kernel_tiles(call)
    q_hull = _widened(_hull(call.rectangles[:, :2]), len(tiles.state))
    k_hull = _widened(_hull_of_tiles(tiles.state.any(axis=0)), tiles.state.shape[1])
    state = tiles.state[q_hull, k_hull]
    rows, keys = _rows(q_hull, len(call.q_coordinates)), _rows(k_hull, len(call.k_coordinates))
    ranges = tiles.ranges[:, :, rows] - keys.start
    if backward:
        state = state.T
    lists = _flash_lists(np.ascontiguousarray(state))
    indices = [arrays.add(x) for x in (*lists, ranges.reshape(-1, ranges.shape[2]))]
    return Lowered(
        rows,
        keys,
        _direct(call, rows),
        tuple(indices),
        _add_states(call.q_states, arrays),
    )


def _flash_lists(state: UInt8) -> tuple[Int32, Int32, Int32, Int32]:
    everything = np.ones(len(state) * SIDE, np.bool_)
    lists = list_tiles_of(state, everything)
    return lists.partial_count, lists.partial, *list_full_tiles(state)


def _hull(spans: Int64) -> slice:
    """From the first kernel tile with a row of the call to the last."""
    return slice(int(spans[:, 0].min()) // SIDE, (int(spans[:, 1].max()) - 1) // SIDE + 1)


def _widened(tiles: slice, num_tiles: int) -> slice:
    """At least two tiles where there are two: flash-attn-4 compiles calls of one piece apart."""
    if tiles.stop - tiles.start > 1 or num_tiles == 1:
        return tiles
    return slice(tiles.start - 1, tiles.stop) if tiles.start else slice(0, 2)


def _hull_of_tiles(used: Any) -> slice:
    tiles = np.flatnonzero(used)
    return slice(int(tiles[0]), int(tiles[-1]) + 1) if len(tiles) else slice(0, 1)


def _rows(tiles: slice, num_rows: int) -> slice:
    return slice(tiles.start * SIDE, min(tiles.stop * SIDE, num_rows))


def _padded(rows: slice) -> slice:
    return slice(rows.start, -(-rows.stop // SIDE) * SIDE)


def _part(x: Tensor, rows: slice) -> Tensor:
    """x[rows], which costs host time where it is all of x."""
    return x if x.shape[0] == rows.stop - rows.start else x[rows]


def _direct(call: KernelCall, rows: slice) -> bool:
    """Whether results may be written where they belong: rows have no other contribution, and those
    between them belong to nobody (flash-attn-4 writes 0 and −∞ there)."""
    states = call.q_states
    only = (states.before[rows] == Held.NOTHING) & (states.after[rows] == Held.FINAL)
    return bool(call.alone or only.all())


def _add_states(states: RowStates, arrays: IndexArrays) -> Index:
    return arrays.add(np.stack([states.before, states.after]))


def _collected_rows(calls: list[Lowered], q_rows: int, k_rows: int) -> tuple[int, int]:
    if len(calls) == 1 and calls[0].places is not None:
        count = len(calls[0].indices[0]) - 1
        return len(calls[0].places), varlen_rows(k_rows, count, SIDE)
    return _padded(slice(0, q_rows)).stop, _padded(slice(0, k_rows)).stop


def _dim(q: Tensor) -> int:
    """Its sums have head dims padded to 32."""
    return -(-q.shape[2] // 32) * 32


@cache
def _why_not(dtype: torch.dtype, dim: int) -> str:
    if dtype in DTYPES and dim <= MOST_DIM and dim % 8 == 0:
        return ""
    return (
        f"kernel 'flash4' takes {', '.join(map(str, DTYPES))} and head dims up to {MOST_DIM} in "
        f"steps of 8; q is {dtype} with head dim {dim}. Kernel 'triton' takes more; kernel='auto' "
        "finds the one that fits"
    )
