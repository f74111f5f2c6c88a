"""RoomMap: where the rooms of a rank's call begin, and the tensors that they are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int64, starts_of
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.kernels import Memory
from dyncp.plan import AttentionShape, Buffer, Messages, Payload, Staging
from dyncp.plan.buffers import CLEARED, MESSAGE_ALIGNMENT, SUMS, first_peers

# What a payload consists of, by the names of the workspace's tensors.
FIELDS = {
    Payload.Q: ("q",),
    Payload.KV: ("k", "v"),
    Payload.OUT: ("lse", "out"),
    Payload.Q_DOUT: ("lse", "delta", "q", "dout"),
    Payload.DQ: ("dq",),
    Payload.DKV: ("dk", "dv"),
}
NAMES = ("q", "k", "v", "dout", "lse", "delta", "out", "dq", "dk", "dv")
CODES = np.full((len(Payload), 4), -1, np.int64)
for _kind, _fields in FIELDS.items():
    CODES[_kind, : len(_fields)] = [NAMES.index(field) for field in _fields]
RESULT_NAMES = ("out", "dq", "dk", "dv")
IS_RESULT, IS_PER_HEAD, IS_KEY = (
    np.asarray([name in names for name in NAMES])
    for names in (RESULT_NAMES, ("lse", "delta"), ("k", "v", "dk", "dv"))
)


@dataclass(frozen=True, eq=False)
class Fields:
    """One field of one payload each. `offset` counts bytes from the start of the phase's buffer;
    `peers` are the slices of the peers' messages there."""

    entry: Int64  # index into the messages
    phase: Int64
    name: Int64  # index into NAMES
    kind: Int64
    group: Int64
    block: Int64
    offset: Int64
    peers: Mapping[int, Mapping[int, slice]]

    def __len__(self) -> int:
        return len(self.entry)


@dataclass(frozen=True, eq=False)
class Widths:
    """Items of a row of each field, int64[fields, head groups], and bytes of an item."""

    items: Int64
    item_bytes: Int64

    @staticmethod
    def of(lowered: LoweredProgram, shape: AttentionShape) -> "Widths":
        kv_heads = np.asarray([group.num_kv_heads for group in lowered.part.groups_for(shape)])
        heads = np.where(IS_KEY[:, None], kv_heads, kv_heads * shape.q_heads_per_kv_head)
        items = np.where(IS_PER_HEAD[:, None], heads, heads * shape.head_dim)
        sizes = (shape.item_bytes, shape.partial_bytes, shape.accumulator_bytes)
        item_bytes = np.select([IS_PER_HEAD, IS_RESULT], [sizes[2], sizes[1]], sizes[0])
        return Widths(items.astype(np.int64), item_bytes.astype(np.int64))


def lay_out_sends(lowered: LoweredProgram, widths: Widths) -> Fields:
    """Messages with the same payloads to several peers are one, which all of them get."""
    sends = lowered.program.sends
    first = first_peers(sends)
    fields = lay_out_messages(lowered, sends.select(first == sends.peer), widths)
    peers: dict[int, dict[int, slice]] = {}
    for phase, peer, same in np.unique(
        np.stack([sends.phase, sends.peer, first]), axis=1
    ).T.tolist():
        peers.setdefault(phase, {})[peer] = fields.peers[phase][same]
    return replace(fields, peers=peers)


def lay_out_messages(lowered: LoweredProgram, messages: Messages, widths: Widths) -> Fields:
    codes = CODES[messages.kind]
    entry, column = np.nonzero(codes >= 0)
    name, group = codes[entry, column], messages.head_group[entry].astype(np.int64)
    row_bytes = widths.items[name, group] * widths.item_bytes[name]
    size = lowered.part.blocks.tokens[messages.block[entry]].astype(np.int64) * row_bytes
    evenness = np.gcd(row_bytes, MESSAGE_ALIGNMENT)
    phase, peer = (column[entry].astype(np.int64) for column in (messages.phase, messages.peer))
    order = np.lexsort((np.arange(len(entry)), -evenness, peer, phase))
    entry, phase, peer, name, group, size = (
        column[order] for column in (entry, phase, peer, name, group, size)
    )
    offset, peers = _offsets(phase, peer, size)
    kind, block = messages.kind[entry].astype(np.int64), messages.block[entry].astype(np.int64)
    return Fields(entry, phase, name, kind, group, block, offset, peers)


def _offsets(phase: Int64, peer: Int64, size: Int64) -> tuple[Int64, dict[int, dict[int, slice]]]:
    """Bytes before every section in its phase's buffer, and the slices of the peers' messages."""
    peers: dict[int, dict[int, slice]] = {}
    if not len(phase):
        return np.zeros(0, np.int64), peers
    new = np.concatenate([[True], (np.diff(phase) != 0) | (np.diff(peer) != 0)])
    first = np.flatnonzero(new)
    before = starts_of(size)
    sizes = np.diff(before[np.append(first, len(size))])
    start, message_start, current = 0, np.empty(len(first), np.int64), -1
    rows = zip(phase[first].tolist(), peer[first].tolist(), sizes.tolist(), strict=True)
    for i, (of_phase, to, length) in enumerate(rows):
        start = start if of_phase == current else 0
        current, message_start[i] = of_phase, start
        peers.setdefault(of_phase, {})[to] = slice(start, start + length)
        start += -(-length // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT
    message = np.cumsum(new) - 1
    return before[:-1] - before[first][message] + message_start[message], peers


PER_HEAD = ("lse", "delta", "lse_call")
Key = tuple[str, int, int]  # name, head group or phase, division


class RoomMap:
    """Bytes count from the start of the call's memory."""

    def __init__(
        self, lowered: LoweredProgram, shape: AttentionShape, rooms: list[Buffer], base: int
    ) -> None:
        sizes = [room.num_bytes for room in rooms]
        starts = list(accumulate(sizes, initial=base))
        self.shape, self.groups = shape, lowered.part.groups_for(shape)
        self.num_bytes = starts[-1] - base
        self.rooms: dict[Key, Buffer] = {(r.name, r.index, r.call): r for r in rooms}
        self.starts: dict[Key, int] = dict(zip(self.rooms, starts, strict=False))
        cleared = [i for i, room in enumerate(rooms) if room.name in CLEARED]
        self._cleared = (starts[cleared[0]], starts[cleared[-1] + 1]) if cleared else (0, 0)
        self.residence = [
            Staging.of(lowered.part, lowered.mask, lowered.program, group, lowered.style)
            for group in range(len(self.groups))
        ]

    def at(self, name: str, index: int, call: int = -1) -> int:
        return self.starts[name, index, call]

    def has(self, name: str, index: int) -> bool:
        return (name, index, -1) in self.starts

    def head_stride(self, name: str, index: int, call: int = -1) -> int:
        """Items between the heads of per-head values, or of sums."""
        shape = self.rooms[name, index, call].shape
        return shape[1] if name in PER_HEAD else shape[1] * shape[2]

    @cached_property
    def heads(self) -> list[tuple[slice, slice]]:
        """q heads and kv heads of every head group."""
        repeat, heads = self.shape.q_heads_per_kv_head, []
        for group in self.groups:
            first, end = group.first_kv_head, group.first_kv_head + group.num_kv_heads
            heads.append((slice(first * repeat, end * repeat), slice(first, end)))
        return heads

    def tensor(self, memory: Memory, key: Key) -> Tensor:
        """The room as kernels take it: [rows, heads, dim]; per-head values [rows, heads]; sums
        [heads, rows × dim]."""
        room, start = self.rooms[key], self.starts[key]
        if room.name in PER_HEAD:
            tensor = _view(memory.wide, start, room.shape)
            return tensor[:, : room.rows].T
        if room.name in SUMS:
            heads, rows, dim = room.shape
            return _view(memory.wide.view(torch.float32), start, (heads, rows * dim))
        flat = memory.wide if room.name.endswith("_wide") else memory.input
        return _view(flat, start, room.shape)

    def cleared(self, memory: Memory) -> Tensor:
        """All that is set to 0 at the start of backward, in one piece."""
        size = memory.wide.element_size()
        return memory.wide[self._cleared[0] // size : self._cleared[1] // size]


def _view(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    first, size = start // flat.element_size(), 1
    for extent in shape:
        size *= extent
    return flat[first : first + size].view(shape)
