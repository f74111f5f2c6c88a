"""RankLayout: where everything of one call lies on one rank, for one attention shape."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Bool, Int64
from dyncp.executor.kernel_calls import after_of, before_of
from dyncp.executor.lowering import LoweredProgram
from dyncp.executor.messages import Item, Mail, Move, lay_out_mail
from dyncp.kernels import Held, IndexArrays, RowOps, accumulator_dtype
from dyncp.plan import AttentionShape, Contributions, Room, Space, list_rooms

PER_HEAD = ("lse", "delta", "lse_partial")
MOST_BETWEEN = 1024  # rows between slots that are settled together


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes of one call."""

    input: torch.dtype
    partial: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        return accumulator_dtype(self.input)

    def of(self, item: Item) -> torch.dtype:
        return {Item.INPUT: self.input, Item.WIDE: self.wide, Item.PARTIAL: self.partial}[item]


@dataclass(frozen=True, slots=True)
class Settlement:
    """Rows whose gradients a settling kernel hands over: straight into the final tensors, or (with
    a table) into a partial buffer that is then added."""

    space: Space
    group: int
    rows: slice
    table: Any = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """The messages of one phase: one byte tensor per peer; all of them in the dtype of each move,
    and in that of log-sum-exps."""

    peers: dict[int, Tensor]
    moves: list[tuple[Move, Tensor]]
    lse: Tensor


@dataclass(frozen=True, slots=True)
class Views:
    """The rooms of one rank as tensors."""

    rooms: dict[tuple[str, int], Tensor]
    sends: dict[int, Buffer]
    receives: dict[int, Buffer]


@dataclass(frozen=True, eq=False)
class RankLayout:
    lowered: LoweredProgram
    rooms: list[Room]
    sends: dict[int, Mail]
    receives: dict[int, Mail]
    settlements: dict[int, list[Settlement]]  # time → what settles then

    @cached_property
    def num_bytes(self) -> int:
        """Without the accumulators of a settling kernel's own, which it takes itself."""
        return sum(room.num_bytes for room in self.rooms if room.name != "own")

    @cached_property
    def own_bytes(self) -> int:
        return sum(room.num_bytes for room in self.rooms if room.name == "own")

    def views(self, base: Tensor, dtypes: Dtypes) -> Views:
        rooms: dict[tuple[str, int], Tensor] = {}
        buffers: dict[str, dict[int, Buffer]] = {"send": {}, "receive": {}}
        first = 0
        for room in self.rooms:
            if room.name == "own":
                continue
            memory = base[first : first + room.num_bytes]
            first += room.num_bytes
            if room.name in buffers:
                mail = (self.sends if room.name == "send" else self.receives)[room.index]
                buffers[room.name][room.index] = _buffer(memory, mail, dtypes)
            else:
                rooms[room.name, room.index] = _tensor(memory, room, dtypes)
        return Views(rooms, buffers["send"], buffers["receive"])


def _buffer(memory: Tensor, mail: Mail, dtypes: Dtypes) -> Buffer:
    peers = {peer: memory[where] for peer, where in mail.peers.items()}
    items = {item: memory.view(dtypes.of(item)) for item in Item}
    return Buffer(peers, [(move, items[move.item]) for move in mail.moves], items[Item.WIDE])


def _tensor(memory: Tensor, room: Room, dtypes: Dtypes) -> Tensor:
    per_head = room.name in PER_HEAD
    dtype = dtypes.wide if per_head or room.name.endswith("_wide") else dtypes.input
    size = int(np.prod(room.shape))
    tensor = memory.view(dtype)[:size].view(room.shape)
    return tensor[:, : room.rows].T if per_head else tensor


def lay_out(
    lowered: LoweredProgram, shape: AttentionShape, row_ops: RowOps, arrays: IndexArrays
) -> RankLayout:
    mask, direction, style = lowered.mask, lowered.direction, lowered.style
    return RankLayout(
        lowered,
        list_rooms(lowered.part, mask, direction, shape, style, lowered.found),
        lay_out_mail(lowered, shape, row_ops, arrays, received=False),
        lay_out_mail(lowered, shape, row_ops, arrays, received=True),
        _settlements(lowered, shape, row_ops, arrays),
    )


def _settlements(
    lowered: LoweredProgram, shape: AttentionShape, row_ops: RowOps, arrays: IndexArrays
) -> dict[int, list[Settlement]]:
    settled: dict[int, list[Settlement]] = {}
    found = lowered.found
    for time in np.unique(found.time[found.time % 2 == 1]).tolist():
        for space in Space:
            for group, heads in enumerate(lowered.part.groups_for(shape)):
                here = (found.space == space) & (found.head_group == group)
                repeat = shape.q_heads_per_kv_head if space is Space.Q else 1
                width = heads.num_kv_heads * repeat * shape.head_dim
                for rows, blocks in _settled_rows(lowered, found, here, time):
                    table = _partial_table(lowered, found, blocks, width, row_ops, arrays)
                    entry = Settlement(space, group, rows, table)
                    settled.setdefault(time, []).append(entry)
    return settled


def _settled_rows(
    lowered: LoweredProgram, found: Contributions, here: Bool, time: int
) -> list[tuple[slice, Int64]]:
    """Own rows together, slots that are near each other too, with the indices of their
    contributions.

    Rows between slots are settled as well. That changes nothing where slots get one contribution,
    settled here and in its final form: those that have it stay as they are, the others are settled
    again. Other slots are settled alone, and none across them."""
    at, (first, end) = np.flatnonzero(here & (found.time == time)), _rows_of(lowered, found)
    own = lowered.part.blocks.owner[found.block[at]] == lowered.part.rank
    rows: list[tuple[slice, Int64]] = []
    if own.any():
        rows.append((slice(0, lowered.local_rows), at[own]))
    _, of_block, counts = np.unique(
        np.where(here, found.block, -1), return_inverse=True, return_counts=True
    )
    one = (counts[of_block] == 1) & (after_of(found) == Held.FINAL) & (found.received < 0)
    others, at = here & ~one, at[~own]
    rows += [(slice(int(first[i]), int(end[i])), np.asarray([i])) for i in at[~one[at]].tolist()]
    near = at[one[at]][np.argsort(first[at[one[at]]])]
    for run in _runs(first[near], end[near], first[others], end[others]):
        rows.append((slice(int(first[near[run]][0]), int(end[near[run]][-1])), near[run]))
    return rows


def _rows_of(lowered: LoweredProgram, found: Contributions) -> tuple[Int64, Int64]:
    """First and last row of the block of every contribution."""
    first = lowered.place[found.space, found.head_group, found.block]
    return first, first + lowered.part.blocks.tokens[found.block]


def _runs(first: Int64, end: Int64, kept_first: Int64, kept_end: Int64) -> list[slice]:
    """Slots, ordered by row, in runs of near ones with none of the kept rows between them."""
    starts = [0] if len(first) else []
    for i in range(1, len(first)):
        between = (kept_first < first[i]) & (kept_end > end[i - 1])
        if first[i] - end[i - 1] > MOST_BETWEEN or between.any():
            starts.append(i)
    return [slice(a, b) for a, b in pairwise([*starts, len(first)])]


def _partial_table(
    lowered: LoweredProgram,
    found: Contributions,
    at: Any,
    width: int,
    row_ops: RowOps,
    arrays: IndexArrays,
) -> Any:
    """How a partial buffer is added to the rows; None where nothing was there before."""
    before, after = before_of(found)[at], after_of(found)[at]
    if (before == Held.NOTHING).all() and (after == Held.FINAL).all():
        return None
    segments = np.zeros((len(at), 7), np.int64)
    segments[:, 0] = lowered.place[found.space[at], found.head_group[at], found.block[at]]
    segments[:, 1] = (segments[:, 0] - segments[:, 0].min()) * width
    segments[:, 2] = lowered.part.blocks.tokens[found.block[at]]
    segments[:, 3], segments[:, 4] = before, after
    return row_ops.tables(segments, np.asarray([0, len(at)]), arrays)[0]
