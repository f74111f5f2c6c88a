"""What flash-attn-4 is told about a call: its own causal and varlen paths, or lists of tiles."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyncp.arrays import Int32, Int64, UInt8
from dyncp.kernels.call import Held, KernelCall, RowStates
from dyncp.kernels.flash4 import compiled as flash
from dyncp.kernels.flash4.sequences import Sequences, find_sequences
from dyncp.kernels.index_arrays import Index, IndexArrays
from dyncp.kernels.tile_lists import (
    SIDE,
    list_full_tiles,
    list_tiles_of,
    map_kernel_tiles,
)
from dyncp.kernels.turned_ranges import turn_ranges

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


def lower_call(call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Lowered:
    sequences = find_sequences(call)
    if sequences is not None and _takes_own_path(sequences, call, backward):
        return _lower_sequences(sequences, call, arrays, backward)
    return _lower_lists(call, arrays, backward)


def _takes_own_path(sequences: Sequences, call: KernelCall, backward: bool) -> bool:
    """One causal sequence collects gradients as lists of tiles do; several lie in another order,
    which only a program of one call may use whose rows are settled all together. Flash-attn-4
    compiles calls of one piece apart: small ones are not worth it."""
    if sequences.q_starts[-1] <= flash.ROWS or sequences.k_starts[-1] <= SIDE:
        return False
    count = len(sequences.q_starts) - 1
    together = not backward or (call.alone and call.in_place)
    return count == 1 or (count <= MOST_SEQUENCES and together)


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
    if backward:
        state, ranges = state.T, turn_ranges(tiles)[:, :, padded(keys)] - rows.start
    else:
        ranges = tiles.ranges[:, :, padded(rows)] - keys.start
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


def padded(rows: slice) -> slice:
    return slice(rows.start, -(-rows.stop // SIDE) * SIDE)


def _direct(call: KernelCall, rows: slice) -> bool:
    """Whether results may be written where they belong: rows have no other contribution, and those
    between them belong to nobody (flash-attn-4 writes 0 and −∞ there)."""
    before, after = call.q_states.before[rows], call.q_states.after[rows]
    only = (before == Held.NOTHING) & (after == Held.FINAL)
    if call.alone:
        only |= after == Held.UNTOUCHED
    return bool(only.all())


def _add_states(states: RowStates, arrays: IndexArrays) -> Index:
    return arrays.add(np.stack([states.before, states.after]))
