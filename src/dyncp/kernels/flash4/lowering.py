"""What flash-attn-4 is told about a call: its own causal and varlen paths, or lists of tiles."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dyncp.arrays import Int32, UInt8
from dyncp.kernels.call import KernelCall
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
    `sequences` are those that are kept apart backward, if there are several."""

    rows: slice
    keys: slice
    indices: tuple[Index, ...]  # of the lists or sequences; none: causal
    sequences: Sequences | None = None
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
        return _lower_sequences(sequences, arrays, backward)
    return _lower_lists(call, arrays, backward)


def _takes_own_path(sequences: Sequences, call: KernelCall, backward: bool) -> bool:
    """One causal sequence collects gradients as lists of tiles do; several lie in another order,
    which only a program of one call may use. Its rows must be those of the call. Flash-attn-4
    compiles calls of one piece apart: small ones are not worth it."""
    queries, keys = int(sequences.q_starts[-1]), int(sequences.k_starts[-1])
    if queries <= flash.MOST_SINGLE or keys <= SIDE:
        return False
    if (call.q_rows.start, call.k_rows.start) != (0, 0) or call.rectangles[:, 3].max() > keys:
        return False
    count = len(sequences.q_starts) - 1
    return count == 1 or (count <= MOST_SEQUENCES and (call.alone or not backward))


def _lower_sequences(sequences: Sequences, arrays: IndexArrays, backward: bool) -> Lowered:
    """Rows behind the last sequence are not part of the call: nobody reads what it leaves there."""
    starts = (sequences.q_starts, sequences.k_starts)
    rows, keys = (slice(0, int(x[-1])) for x in starts)
    several = len(sequences.q_starts) > 2
    return Lowered(
        rows,
        keys,
        tuple(arrays.add(x) for x in starts) if several else (),
        sequences if several and backward else None,
    )


def _lower_lists(call: KernelCall, arrays: IndexArrays, backward: bool) -> Lowered:
    tiles, rows, keys = map_kernel_tiles(call), call.q_rows, call.k_rows
    state = tiles.state[_tiles(rows), _tiles(keys)]
    if backward:
        state, ranges = state.T, turn_ranges(tiles)[:, :, padded(keys)] - rows.start
    else:
        ranges = tiles.ranges[:, :, padded(rows)] - keys.start
    lists = _flash_lists(np.ascontiguousarray(state))
    indices = [arrays.add(x) for x in (*lists, ranges.reshape(-1, ranges.shape[2]))]
    return Lowered(rows, keys, tuple(indices))


def _flash_lists(state: UInt8) -> tuple[Int32, Int32, Int32, Int32]:
    everything = np.ones(len(state) * SIDE, np.bool_)
    lists = list_tiles_of(state, everything)
    return lists.partial_count, lists.partial, *list_full_tiles(state)


def _tiles(rows: slice) -> slice:
    return slice(rows.start // SIDE, -(-rows.stop // SIDE))


def padded(rows: slice) -> slice:
    return slice(rows.start, -(-rows.stop // SIDE) * SIDE)
