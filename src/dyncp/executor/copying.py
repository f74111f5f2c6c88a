"""What is copied when: own rows into workspaces and messages, received ones into their slots and
on into other messages."""

import numpy as np

from dyncp.arrays import Bool, Int64
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.executor.order import START
from dyncp.executor.rooms import IS_KEY, IS_PER_HEAD, IS_RESULT, NAMES, Fields, RoomMap, Widths
from dyncp.kernels import Kernel
from dyncp.kernels.kernel import SequenceRows
from dyncp.kernels.row_ops import OWN, Copy, Kind, RowSum
from dyncp.plan import Op, Space
from dyncp.plan.buffers import INPUTS, times_of

# The caller's tensors, in the order in which `RowOps.copy` gets them.
GIVEN = ("q", "k", "v", "dout")
LSE, DELTA = NAMES.index("lse"), NAMES.index("delta")
SOURCE = np.asarray([GIVEN.index(name) if name in GIVEN else len(GIVEN) for name in NAMES])


def list_copies(
    lowered: LoweredProgram,
    rooms: RoomMap,
    widths: Widths,
    sends: Fields,
    receives: Fields,
    first_row: int,
) -> dict[int, Int64]:
    """int64[copies, columns of `Copy`] by time; only times at which something is copied."""
    builder = _Copies(lowered, rooms, widths, first_row)
    inputs = _travels_as_input(sends, lowered)
    own = inputs & (lowered.part.blocks.owner[sends.block] == lowered.part.rank)
    arrived = _travels_as_input(receives, lowered)
    parts = [
        builder.own_rows(),
        builder.gaps(),
        builder.packed(sends, own),
        builder.unpacked(receives, arrived),
        builder.passed_on(sends, inputs & ~own, receives, arrived),
    ]
    times = np.concatenate([time for time, _ in parts])
    copies = np.concatenate([entries for _, entries in parts])
    copied = copies[:, Copy.COUNT] > 0
    times, copies = times[copied], copies[copied]
    return {int(time): copies[times == time] for time in np.unique(times)}


def _travels_as_input(fields: Fields, lowered: LoweredProgram) -> Bool:
    """Log-sum-exps go with queries backward, and with outputs forward."""
    inputs: Bool = ~IS_RESULT[fields.name] & ((fields.name != LSE) | lowered.backward)
    return inputs


class _Copies:
    def __init__(
        self, lowered: LoweredProgram, rooms: RoomMap, widths: Widths, first_row: int
    ) -> None:
        self._lowered, self._rooms, self._widths = lowered, rooms, widths
        self._first_row, self._part = first_row, lowered.part
        self._item = rooms.shape.item_bytes
        groups = range(len(rooms.groups))
        self._first_head = np.asarray([[h[0].start, h[1].start] for h in rooms.heads])
        self._sends = message_starts(rooms, "send")
        self._receives = message_starts(rooms, "receive")
        known = [[rooms.has(name, g) for g in groups] for name in NAMES]
        self._room = np.asarray(
            [[rooms.at(name, g) if rooms.has(name, g) else -1 for g in groups] for name in NAMES]
        )
        self._stride = np.asarray(
            [
                [
                    rooms.head_stride(name, g) if has and IS_PER_HEAD[i] else 0
                    for g, has in zip(groups, known[i], strict=True)
                ]
                for i, name in enumerate(NAMES)
            ]
        )

    def own_rows(self) -> tuple[Int64, Int64]:
        """Of inputs that lie in a room."""
        entries = []
        for group in range(len(self._rooms.groups)):
            for space in Space:
                for name in INPUTS[self._lowered.direction][space]:
                    if self._rooms.has(name, group):
                        code = NAMES.index(name)
                        width = int(self._widths.items[code, group])
                        entry = _blank(1)
                        entry[:, Copy.COUNT] = self._part.local_tokens
                        entry[:, Copy.WIDTH] = entry[:, Copy.TO_ROW] = width
                        entry[:, Copy.SOURCE], entry[:, Copy.FROM] = SOURCE[code], self._first_row
                        entry[:, Copy.COLUMN] = self._first_column(code, group)
                        entry[:, Copy.TO] = self._rooms.at(name, group)
                        entries.append(entry)
        return _at_start(entries)

    def _first_column(self, name: Int64 | int, group: Int64 | int) -> Int64:
        head = self._first_head[group, IS_KEY[name].astype(np.int64)]
        columns: Int64 = np.where(IS_PER_HEAD[name], head, head * self._rooms.shape.head_dim)
        return columns

    def gaps(self) -> tuple[Int64, Int64]:
        """Rows of kernel tiles that nobody has count nothing, but 0 × NaN would be NaN: those
        behind the last own row, and behind the last row of every slot."""
        entries = []
        for group in range(len(self._rooms.groups)):
            for space in Space:
                if not self._rooms.residence[group].inputs[space]:
                    continue
                first, end = self._unused(space, group)
                for name in INPUTS[self._lowered.direction][space]:
                    width = int(self._widths.items[NAMES.index(name), group])
                    entry = _blank(len(first))
                    entry[:, Copy.KIND], entry[:, Copy.COUNT] = Kind.ZEROS, end - first
                    entry[:, Copy.WIDTH] = entry[:, Copy.TO_ROW] = width
                    start = self._rooms.at(name, group)
                    entry[:, Copy.TO] = start + first * width * self._item
                    entries.append(entry)
        return _at_start(entries)

    def _unused(self, space: Space, group: int) -> tuple[Int64, Int64]:
        slots, part = self._lowered.program.slots, self._part
        rows = int(self._lowered.program.workspace_rows[space, group])
        mine = (slots.space == space) & (slots.head_group == group)
        end = slots.row[mine].astype(np.int64) + part.blocks.tokens[slots.block[mine]]
        first = np.append(end, part.local_tokens)
        side = max(part.slot_alignment, 1)
        if side % WHOLE_TILE:  # kernel tiles hold rows of several slots, some of them not there yet
            return np.asarray([part.local_tokens]), np.asarray([rows])
        last = np.minimum(-(-first // side) * side, rows)
        first, last = np.unique(np.stack([first, last]), axis=1)
        return first, last

    def packed(self, fields: Fields, chosen: Bool) -> tuple[Int64, Int64]:
        """Own rows into messages. Row sums are made beforehand, where the kernel reads them."""
        at = np.flatnonzero(chosen)
        entries = self._to_messages(fields, at)
        name, group = fields.name[at], fields.group[at]
        row = self._part.block_row[fields.block[at]]
        entries[:, Copy.SOURCE], entries[:, Copy.FROM] = SOURCE[name], self._first_row + row
        entries[:, Copy.COLUMN] = self._first_column(name, group)
        delta = name == DELTA
        wide = self._rooms.shape.accumulator_bytes
        entries[delta, Copy.SOURCE] = OWN
        entries[delta, Copy.FROM] = (self._room[DELTA, group] + row * wide)[delta]
        entries[delta, Copy.FROM_ROW] = 1
        entries[delta, Copy.FROM_HEAD] = self._stride[DELTA, group][delta]
        entries[delta, Copy.COLUMN] = 0
        return np.full(len(at), START), entries

    def unpacked(self, fields: Fields, chosen: Bool) -> tuple[Int64, Int64]:
        """Received inputs into their slots."""
        at = np.flatnonzero(chosen)
        entries = self._from_messages(fields, at)
        name, group, width = fields.name[at], fields.group[at], entries[:, Copy.WIDTH]
        space = np.where(IS_KEY[name], int(Space.KV), int(Space.Q))
        row = self._lowered.place[space, group, fields.block[at]]
        per_head, wide = IS_PER_HEAD[name], self._rooms.shape.accumulator_bytes
        step = np.where(per_head, wide, width * self._item)
        entries[:, Copy.TO] = self._room[name, group] + row * step
        entries[:, Copy.TO_ROW] = np.where(per_head, 1, width)
        entries[:, Copy.TO_HEAD] = self._stride[name, group]
        if self._lowered.style.collects:
            entries[name == LSE, Copy.KIND] = Kind.BASE_2
        return self._waits()[fields.phase[at]], entries

    def passed_on(
        self, sends: Fields, chosen: Bool, receives: Fields, arrived: Bool
    ) -> tuple[Int64, Int64]:
        """Received inputs into other messages, straight from the one that they came in."""
        at, came = np.flatnonzero(chosen), np.flatnonzero(arrived)
        known, wanted = self._keys(receives, came), self._keys(sends, at)
        order = np.argsort(known)
        came = came[order][np.searchsorted(known[order], wanted)] if len(at) else came[:0]
        entries, target = self._from_messages(receives, came), self._to_messages(sends, at)
        for column in (Copy.TO, Copy.TO_ROW, Copy.TO_HEAD):
            entries[:, column] = target[:, column]
        return self._waits()[receives.phase[came]], entries

    def _keys(self, fields: Fields, at: Int64) -> Int64:
        of_payload = fields.kind[at] * len(self._rooms.groups) + fields.group[at]
        keys: Int64 = (of_payload * len(self._part.blocks) + fields.block[at]) * len(NAMES)
        return keys + fields.name[at]

    def _waits(self) -> Int64:
        return np.append(times_of(self._lowered.program, Op.WAIT), 0)

    def _of(self, fields: Fields, at: Int64) -> Int64:
        entries, name = _blank(len(at)), fields.name[at]
        entries[:, Copy.KIND] = np.where(IS_PER_HEAD[name], Kind.PER_HEAD, Kind.ROWS)
        entries[:, Copy.COUNT] = self._part.blocks.tokens[fields.block[at]]
        entries[:, Copy.WIDTH] = self._widths.items[name, fields.group[at]]
        return entries

    def _to_messages(self, fields: Fields, at: Int64) -> Int64:
        entries = self._of(fields, at)
        entries[:, Copy.TO] = self._sends[fields.phase[at]] + fields.offset[at]
        entries[:, Copy.TO_ROW], entries[:, Copy.TO_HEAD] = entries[:, Copy.WIDTH], 1
        return entries

    def _from_messages(self, fields: Fields, at: Int64) -> Int64:
        entries = self._of(fields, at)
        entries[:, Copy.FROM] = self._receives[fields.phase[at]] + fields.offset[at]
        entries[:, Copy.FROM_ROW], entries[:, Copy.FROM_HEAD] = entries[:, Copy.WIDTH], 1
        return entries


WHOLE_TILE = 128  # rows: the kernel tiles of all kernels divide it


def _blank(count: int) -> Int64:
    entries = np.zeros((count, len(Copy)), np.int64)
    entries[:, Copy.SOURCE] = OWN
    return entries


def _at_start(entries: list[Int64]) -> tuple[Int64, Int64]:
    joined = np.concatenate([_blank(0), *entries])
    return np.full(len(joined), START), joined


def message_starts(rooms: RoomMap, name: str) -> Int64:
    """First byte of the buffer of every phase; 0 for phases without one."""
    of_phase = {index: start for (n, index, _), start in rooms.starts.items() if n == name}
    starts = np.zeros(max(of_phase, default=-1) + 2, np.int64)
    for phase, start in of_phase.items():
        starts[phase] = start
    return starts


def list_row_sums(lowered: LoweredProgram, rooms: RoomMap, first_row: int, kernel: Kernel) -> Int64:
    """int64[rows, columns of `RowSum`] of own rows, which lie in order; sequences that a kernel
    wants on borders of its kernel tiles each by itself."""
    entries = []
    wide = rooms.shape.accumulator_bytes
    for group in range(len(rooms.groups)):
        (q_heads, _), stride = rooms.heads[group], rooms.head_stride("lse", group)
        for start, count, place, padded in own_sequence_rows(
            lowered, group, kernel, rooms.shape.head_dim
        ):
            entry = np.zeros(len(RowSum), np.int64)
            entry[RowSum.ROW], entry[RowSum.HEAD] = first_row + start, q_heads.start
            entry[RowSum.HEADS] = q_heads.stop - q_heads.start
            entry[RowSum.COUNT], entry[RowSum.PADDED] = count, padded
            entry[RowSum.DELTA] = rooms.at("delta", group) + place * wide
            entry[RowSum.LSE] = rooms.at("lse", group) + place * wide
            entry[RowSum.STRIDE] = stride
            entries.append(entry)
    return np.stack(entries) if entries else np.zeros((0, len(RowSum)), np.int64)


def own_sequence_rows(
    lowered: LoweredProgram, group: int, kernel: Kernel, dim: int
) -> list[SequenceRows]:
    """Query rows that lie together: whole sequences, or all of them."""
    tokens = lowered.part.local_tokens
    return sequence_rows(lowered, group, kernel, dim, Space.Q) or [
        SequenceRows(0, tokens, 0, tokens)
    ]


def sequence_rows(
    lowered: LoweredProgram, group: int, kernel: Kernel, dim: int, space: Space
) -> list[SequenceRows]:
    """Whole sequences, where a kernel that collects keeps each from a border of its kernel tiles
    on; empty where rows lie in order."""
    calls = [call for calls in lowered.calls.values() for g, call in calls if g == group]
    if not lowered.backward or not lowered.style.most_sequences or len(calls) != 1:
        return []
    return kernel.sequence_rows(calls[0], dim)[space]
