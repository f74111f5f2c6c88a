"""Where every payload lies in its message, for one attention shape.

All payloads of one phase and peer are one message; the messages of one phase lie behind each other
in one buffer, those with the same payloads in the same place. A message has the sections with the
most even rows first (rows of 256 bytes before log-sum-exps of 12), so that every section is aligned
as well as its rows are, without padding, and its bytes are exactly those of the payloads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dyncp.arrays import Int64, starts_of
from dyncp.executor.lowering import LoweredProgram
from dyncp.plan import AttentionShape, Messages, Payload
from dyncp.plan.buffers import MESSAGE_ALIGNMENT, first_peers

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
