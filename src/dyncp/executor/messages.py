"""Where every payload lies in its message, for one attention shape.

All payloads of one phase and peer are one message; the messages of one phase lie behind each other
in one buffer. A message has the sections with the most even rows first (rows of 256 bytes before
log-sum-exps of 12), so that every section is aligned as well as its rows are, without padding, and
its bytes are exactly those of the payloads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from dyncp.arrays import Int64, starts_of
from dyncp.executor.kernel_calls import after_of, before_of
from dyncp.executor.lowering import LoweredProgram
from dyncp.kernels import IndexArrays, RowOps
from dyncp.plan import INPUT_SPACE, RESULT_SPACE, AttentionShape, Messages, Payload, Space
from dyncp.plan.rooms import MESSAGE_ALIGNMENT

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
SPACES = np.asarray([int((INPUT_SPACE | RESULT_SPACE)[kind]) for kind in Payload])


class Item(Enum):
    """Dtype of a field in a message."""

    INPUT = "q's dtype"
    WIDE = "the accumulator dtype"
    PARTIAL = "the dtype in which partial results travel"


# Fields that travel in one launch with another: same heads, same dtype.
SECONDS = {"k": "v", "q": "dout", "lse": "delta", "dk": "dv"}
FAMILY, WHICH = np.arange(len(NAMES)), np.zeros(len(NAMES), np.int64)
for _first, _second in SECONDS.items():
    FAMILY[NAMES.index(_second)], WHICH[NAMES.index(_second)] = NAMES.index(_first), 1

ITEMS = dict.fromkeys(("q", "k", "v", "dout"), Item.INPUT)
ITEMS |= dict.fromkeys(("lse", "delta"), Item.WIDE)
ITEMS |= dict.fromkeys(("out", "dq", "dk", "dv"), Item.PARTIAL)


@dataclass(frozen=True, slots=True)
class Move:
    """One launch: one or two fields of a head group between its workspace and the messages of a
    phase."""

    fields: tuple[str, ...]
    group: int
    item: Item
    table: Any


@dataclass(frozen=True, slots=True)
class Mail:
    """The messages of one phase, in one direction."""

    peers: Mapping[int, slice]  # bytes of the phase's buffer
    moves: list[Move]


def lay_out_mail(
    lowered: LoweredProgram,
    shape: AttentionShape,
    row_ops: RowOps,
    arrays: IndexArrays,
    *,
    received: bool,
) -> dict[int, Mail]:
    """Mail of every phase in which this rank sends (or receives)."""
    messages = lowered.program.receives if received else lowered.program.sends
    sections = _Sections.of(lowered, messages, shape)
    if received:
        sections = sections.with_states(lowered)
    key = np.stack([sections.phase, FAMILY[sections.field], sections.group])
    order = np.lexsort((sections.turn, *key[::-1]))
    key, which = key[:, order], WHICH[sections.field[order]]
    changes = np.flatnonzero((np.diff(key) != 0).any(axis=0)) + 1
    bounds = np.concatenate([[0], changes, [len(order)]]) if len(order) else np.zeros(1, np.int64)
    tables = row_ops.tables(sections.segments[order], bounds, arrays)
    paired = np.logical_or.reduceat(which > 0, bounds[:-1]).tolist() if len(order) else []
    moves: dict[int, list[Move]] = {}
    heads = zip(key[:, bounds[:-1]].T.tolist(), paired, tables, strict=True)
    for (phase, family, group), two, table in heads:
        name = NAMES[family]
        fields = (name, SECONDS[name]) if two else (name,)
        moves.setdefault(phase, []).append(Move(fields, group, ITEMS[name], table))
    return {phase: Mail(peers, moves[phase]) for phase, peers in sections.peers.items()}


@dataclass(frozen=True, eq=False)
class _Sections:
    """One field of one payload each. `turn` counts the payloads of a phase for the same rows,
    which are added in this order."""

    entry: Int64  # index into the messages
    phase: Int64
    field: Int64
    group: Int64
    turn: Int64
    segments: Int64  # [sections, 7], as RowOps wants them
    peers: Mapping[int, Mapping[int, slice]]

    @staticmethod
    def of(lowered: LoweredProgram, messages: Messages, shape: AttentionShape) -> "_Sections":
        codes = CODES[messages.kind]
        entry, column = np.nonzero(codes >= 0)
        field, group = codes[entry, column], messages.head_group[entry].astype(np.int64)
        item, row_bytes = _sizes(shape, lowered)
        tokens = lowered.part.blocks.tokens[messages.block[entry]].astype(np.int64)
        size = tokens * row_bytes[field, group]
        evenness = np.gcd(row_bytes[field, group], MESSAGE_ALIGNMENT)
        phase, peer = (column[entry].astype(np.int64) for column in (messages.phase, messages.peer))
        order = np.lexsort((np.arange(len(entry)), -evenness, peer, phase))
        entry, phase, peer, field, group, tokens, size = (
            column[order] for column in (entry, phase, peer, field, group, tokens, size)
        )
        offset, peers = _offsets(phase, peer, size)
        block = messages.block[entry]
        segments = np.zeros((len(entry), 7), np.int64)
        segments[:, 0] = lowered.place[SPACES[messages.kind[entry]], group, block]
        segments[:, 1] = offset // item[field]
        segments[:, 2], segments[:, 6] = tokens, WHICH[field]
        turn = np.zeros(len(entry), np.int64)
        return _Sections(entry, phase, field, group, turn, segments, peers)

    def with_states(self, lowered: LoweredProgram) -> "_Sections":
        """Results get the states of their rows, and log-sum-exps go with their outputs."""
        found, received = lowered.found, lowered.program.receives
        before, after = (np.zeros(len(received), np.uint8) for _ in range(2))
        own = found.received >= 0
        before[found.received[own]] = before_of(found)[own]
        after[found.received[own]] = after_of(found)[own]
        segments = self.segments.copy()
        segments[:, 3], segments[:, 4] = before[self.entry], after[self.entry]
        kind = received.kind[self.entry]
        is_lse = (kind == Payload.OUT) & (self.field == NAMES.index("lse"))
        lse_offset = np.zeros(len(received), np.int64)
        lse_offset[self.entry[is_lse]] = segments[is_lse, 1]
        segments[:, 5] = lse_offset[self.entry]
        turn, kept = _turns(self, received), ~is_lse
        return _Sections(
            self.entry[kept],
            self.phase[kept],
            self.field[kept],
            self.group[kept],
            turn[kept],
            segments[kept],
            self.peers,
        )


def _turns(sections: _Sections, received: Messages) -> Int64:
    """How many payloads for the same rows come before in the same phase, in the plan's order."""
    block = received.block[sections.entry]
    keys = np.stack([sections.phase, sections.field, sections.group, block])
    order = np.lexsort((sections.entry, *keys[::-1]))
    sorted_keys = keys[:, order]
    same = (np.diff(sorted_keys) == 0).all(axis=0)
    place = np.arange(len(order))
    first = np.where(np.concatenate([np.zeros(min(1, len(order)), np.bool_), same]), 0, place)
    turn = np.empty(len(order), np.int64)
    turn[order] = place - np.maximum.accumulate(first) if len(order) else place
    return turn


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


def _sizes(shape: AttentionShape, lowered: LoweredProgram) -> tuple[Int64, Int64]:
    """Bytes of an item of each field, and of a row of each field and head group."""
    bytes_of = {
        Item.INPUT: shape.item_bytes,
        Item.WIDE: shape.accumulator_bytes,
        Item.PARTIAL: shape.partial_bytes,
    }
    item = np.asarray([bytes_of[ITEMS[name]] for name in NAMES])
    kv_heads = np.asarray([group.num_kv_heads for group in lowered.part.groups_for(shape)])
    rows = []
    for name in NAMES:
        heads = kv_heads * (1 if name in ("k", "v", "dk", "dv") else shape.q_heads_per_kv_head)
        rows.append(heads * (1 if ITEMS[name] is Item.WIDE else shape.head_dim))
    return item, np.stack(rows) * item[:, None]


def space_of(field: str) -> Space:
    return Space.KV if field in ("k", "v", "dk", "dv") else Space.Q
