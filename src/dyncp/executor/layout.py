"""RankLayout: the memory of a call on one rank, for one attention shape: where each buffer starts,
and each field of each payload in the messages."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Bool, Int64, starts_of
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.kernels import Dtypes, Memory
from dyncp.plan import DTYPE_NAMES, AttentionShape, Buffer, Messages, Payload
from dyncp.plan.buffers import CLEARED, MESSAGE_ALIGNMENT, SUMS, first_peers

DTYPES: dict[torch.dtype, str] = {getattr(torch, x): name for x, name in DTYPE_NAMES.items()}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


def dtypes_of(shape: AttentionShape) -> Dtypes:
    return Dtypes(BY_NAME[shape.dtype], BY_NAME[shape.partial_dtype or shape.dtype])


# Tensors of a workspace: the caller's inputs and log-sum-exps, in the order of their numbers in
# `Copy.SOURCE`, then row sums and results.
NAMES = ("q", "k", "v", "dout", "lse", "delta", "out", "dq", "dk", "dv")
INPUT_NAMES, RESULT_NAMES = NAMES[:4], NAMES[6:]
LSE, DELTA = NAMES.index("lse"), NAMES.index("delta")
IS_RESULT, IS_PER_HEAD, IS_KEY = (
    np.asarray([name in names for name in NAMES])
    for names in (RESULT_NAMES, ("lse", "delta"), ("k", "v", "dk", "dv"))
)
PER_HEAD = ("lse", "delta", "lse_call")
# The fields of each payload.
FIELDS = {
    Payload.Q: ("q",),
    Payload.KV: ("k", "v"),
    Payload.OUT: ("lse", "out"),
    Payload.Q_DOUT: ("lse", "delta", "q", "dout"),
    Payload.DQ: ("dq",),
    Payload.DKV: ("dk", "dv"),
}
CODES = np.full((len(Payload), 4), -1, np.int64)
for _kind, _fields in FIELDS.items():
    CODES[_kind, : len(_fields)] = [NAMES.index(field) for field in _fields]


@dataclass(frozen=True, eq=False)
class PayloadFields:
    """A table with one row per field of a payload. `at` and the slices of messages are byte offsets
    from the start of the call's memory."""

    entry: Int64  # index into the messages
    phase: Int64
    name: Int64  # index into NAMES
    group: Int64
    block: Int64
    at: Int64
    peers: Mapping[int, Mapping[int, slice]]  # phase → peer → its message

    def inputs(self, *, backward: bool) -> Bool:
        """Which fields are inputs. Log-sum-exps belong to the inputs only in backward."""
        inputs: Bool = ~IS_RESULT[self.name] & ((self.name != LSE) | backward)
        return inputs

    def lse_of_entry(self) -> Int64:
        """Offset of the log-sum-exps of each payload, by entry; 0 if it has none."""
        at = np.zeros(int(self.entry.max(initial=-1)) + 1, np.int64)
        with_lse = self.name == LSE
        at[self.entry[with_lse]] = self.at[with_lse]
        return at


Key = tuple[str, int, int]  # a buffer's name, its head group or phase, its division


class RankLayout:
    """All offsets are bytes from the start of the call's memory. This rank's memory starts at
    `base`; its rows start at `first_row` among those of this process.

    `items` [names, head groups] are the items in a row of a tensor, `item_bytes` [names] the bytes
    of an item. `start` [names, head groups] is the offset of a workspace's tensor, -1 if it has
    none, and `stride` the number of items between heads if the tensor is stored heads first."""

    def __init__(
        self, program: LoweredProgram, shape: AttentionShape, base: int = 0, first_row: int = 0
    ) -> None:
        part, buffers = program.part, program.buffers(shape)
        starts = list(accumulate((buffer.num_bytes for buffer in buffers), initial=base))
        self.program, self.shape, self.first_row = program, shape, first_row
        self.num_bytes = starts[-1] - base
        self.buffers: dict[Key, Buffer] = {(b.name, b.index, b.call): b for b in buffers}
        self.starts: dict[Key, int] = dict(zip(self.buffers, starts, strict=False))
        cleared = [i for i, buffer in enumerate(buffers) if buffer.name in CLEARED]
        self._cleared = (starts[cleared[0]], starts[cleared[-1] + 1]) if cleared else (0, 0)
        groups, repeat = part.groups_for(shape), shape.q_heads_per_kv_head
        self.num_groups = len(groups)
        first = np.asarray([group.first_kv_head for group in groups], np.int64)
        count = np.asarray([group.num_kv_heads for group in groups], np.int64)
        of_keys = IS_KEY[:, None]
        self._first_head = np.where(of_keys, first, first * repeat)
        self.num_heads = np.where(of_keys, count, count * repeat)
        self.items = self.num_heads * np.where(IS_PER_HEAD, 1, shape.head_dim)[:, None]
        sizes = (shape.item_bytes, shape.partial_bytes, shape.accumulator_bytes)
        self.item_bytes = np.select([IS_PER_HEAD, IS_RESULT], [sizes[2], sizes[1]], sizes[0])
        self.start = np.stack([self.starts_of(name) for name in NAMES])
        indices = range(self.num_groups)
        self.stride = np.asarray([[self.head_stride(x, i) for i in indices] for x in NAMES])
        sends, receives = program.program.sends, program.program.receives
        self.sends = self._with_equal_messages(sends)
        self.receives = self._fields("receive", receives)

    def starts_of(self, name: str) -> Int64:
        """Offset of a buffer by head group; -1 if there is none."""
        groups = range(self.num_groups)
        return np.asarray([self.starts.get((name, group, -1), -1) for group in groups], np.int64)

    def has_buffer(self, name: str, group: int) -> bool:
        """Whether calls write a result to a buffer, shared by all calls or their own."""
        names = (name, f"{name}_sums", f"{name}_call")
        return any(index == group and of in names for of, index, _ in self.buffers)

    def head_stride(self, name: str, group: int, call: int = -1) -> int:
        """Items between heads in buffers that are stored heads first (per-head values and sums); 0
        for other buffers."""
        buffer = self.buffers.get((name, group, call))
        return prod(buffer.shape[1:]) if buffer and name in (*PER_HEAD, *SUMS) else 0

    def heads(self, name: str, group: int) -> slice:
        """The heads of a head group in the caller's tensor."""
        code = NAMES.index(name)
        first, count = int(self._first_head[code, group]), int(self.num_heads[code, group])
        return slice(first, first + count)

    def first_item(self, name: Int64, group: Int64) -> Int64:
        """The first item of a head group in a row of the caller's tensor."""
        head = self._first_head[name, group]
        return np.where(IS_PER_HEAD[name], head, head * self.shape.head_dim)

    def tensor(self, memory: Memory, key: Key) -> Tensor:
        """A buffer as a tensor: [rows, heads, dim], per-head values [rows, heads], or sums [heads,
        rows × dim]."""
        buffer, start = self.buffers[key], self.starts[key]
        if buffer.name in PER_HEAD:
            return _view(memory.wide, start, buffer.shape)[:, : buffer.rows].T
        if buffer.name in SUMS:
            heads, rows, dim = buffer.shape
            return _view(memory.wide.view(torch.float32), start, (heads, rows * dim))
        flat = memory.wide if buffer.name.endswith("_wide") else memory.input
        return _view(flat, start, buffer.shape)

    def cleared(self, memory: Memory) -> Tensor:
        """The buffers that are set to 0 at the start of backward, as one tensor."""
        size = memory.wide.element_size()
        return memory.wide[self._cleared[0] // size : self._cleared[1] // size]

    def _with_equal_messages(self, sends: Messages) -> PayloadFields:
        """Fields of the messages to send. A message that several peers get is stored once."""
        first = first_peers(sends)
        fields = self._fields("send", sends, first == sends.peer)
        peers: dict[int, dict[int, slice]] = {}
        messages = np.unique(np.stack([sends.phase, sends.peer, first]), axis=1)
        for phase, peer, same in messages.T.tolist():
            peers.setdefault(phase, {})[peer] = fields.peers[phase][same]
        return replace(fields, peers=peers)

    def _fields(self, buffer: str, messages: Messages, packed: Bool | None = None) -> PayloadFields:
        """Fields ordered by phase and peer, those with the largest alignment first: of all
        payloads, or of the `packed` ones."""
        exists = CODES[messages.kind] >= 0
        entry, column = np.nonzero(exists if packed is None else exists & packed[:, None])
        kind, group, block, phase, peer = (
            x[entry].astype(np.int64)
            for x in (
                messages.kind, messages.head_group, messages.block, messages.phase, messages.peer
            )
        )  # fmt: skip
        name = CODES[kind, column]
        row_bytes = self.items[name, group] * self.item_bytes[name]
        size = self.program.part.blocks.tokens[block] * row_bytes
        evenness = np.gcd(row_bytes, MESSAGE_ALIGNMENT)
        order = np.lexsort((np.arange(len(entry)), -evenness, peer, phase))
        entry, phase, peer, name, group, block, size = (
            x[order] for x in (entry, phase, peer, name, group, block, size)
        )
        at, peers = self._offsets(buffer, phase, peer, size)
        return PayloadFields(entry, phase, name, group, block, at, peers)

    def _offsets(
        self, buffer: str, phase: Int64, peer: Int64, size: Int64
    ) -> tuple[Int64, dict[int, dict[int, slice]]]:
        """The offset of every field, and the slices of the peers' messages."""
        peers: dict[int, dict[int, slice]] = {}
        new = np.append(True, (np.diff(phase) != 0) | (np.diff(peer) != 0))[: len(phase)]
        first, message = np.flatnonzero(new), np.cumsum(new) - 1
        before = starts_of(size)
        sizes = np.diff(before[np.append(first, len(size))])
        starts = np.zeros(len(first), np.int64)
        end = 0
        for i, (of_phase, to, length) in enumerate(
            zip(phase[first].tolist(), peer[first].tolist(), sizes.tolist(), strict=True)
        ):
            if of_phase not in peers:
                end = self.starts[buffer, of_phase, -1]
            starts[i] = end
            peers.setdefault(of_phase, {})[to] = slice(end, end + length)
            end += -(-length // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT
        return (starts - before[first])[message] + before[:-1], peers


def _view(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    first = start // flat.element_size()
    return flat[first : first + prod(shape)].view(shape)
