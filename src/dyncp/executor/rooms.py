"""RoomMap: where the rooms of a rank's call begin, and the tensors that they are."""

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from dyncp.executor.lowering import LoweredProgram
from dyncp.kernels import Memory
from dyncp.plan import AttentionShape, Buffer, Staging
from dyncp.plan.buffers import CLEARED, SUMS

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
