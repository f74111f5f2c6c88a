"""What is added up when: contributions to own rows at the end of a call, those to rows that leave
when the last of them is there."""

from collections.abc import Iterator

import numpy as np

from dyncp.arrays import Bool, Int64
from dyncp.executor.copying import message_starts, sequence_rows
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.executor.rooms import IS_RESULT, NAMES, Fields, RoomMap, Widths
from dyncp.kernels import Kernel
from dyncp.kernels.kernel import SequenceRows
from dyncp.kernels.row_ops import OWN, Form, Source, Target
from dyncp.plan import Op, Space, call_rows
from dyncp.plan.buffers import OUTPUTS

LSE = NAMES.index("lse")
# Results in the order in which the caller gets them.
RESULTS = {"out": 0, "dq": 0, "dk": 1, "dv": 2}
IN_ORDER = 1 << 40  # received contributions come after computed ones
OF_RUNS = 1 << 40  # keys of sequences, above those of blocks
NO_SOURCES = -1

Table = tuple[Int64, Int64]


def list_combinations(
    lowered: LoweredProgram,
    rooms: RoomMap,
    widths: Widths,
    sends: Fields,
    receives: Fields,
    ready: dict[int, int],
    first_row: int,
    kernel: Kernel,
) -> dict[int, Table]:
    """Targets and sources by time; those of own rows at the end of the program."""
    builder = _Combinations(lowered, rooms, widths, receives, first_row, kernel)
    found = {}
    phases = np.asarray([ready.get(int(p), 0) for p in sends.phase], np.int64)
    leaving = IS_RESULT[sends.name]
    for time in np.unique(phases[leaving]).tolist():
        found[time] = builder.to_messages(sends, np.flatnonzero(leaving & (phases == time)))
    at_end = builder.to_results()
    if len(at_end[0]):
        found[len(lowered.instructions)] = at_end
    return found


class _Combinations:
    def __init__(
        self,
        lowered: LoweredProgram,
        rooms: RoomMap,
        widths: Widths,
        receives: Fields,
        first_row: int,
        kernel: Kernel,
    ) -> None:
        self._lowered, self._rooms, self._widths = lowered, rooms, widths
        self._first_row, self._kernel, self._part = first_row, kernel, lowered.part
        self._item, self._wide = rooms.shape.item_bytes, rooms.shape.accumulator_bytes
        computed, received = self._computed(), self._received(receives)
        keys = np.concatenate([computed[0], received[0]])
        order = np.concatenate([computed[1], IN_ORDER + received[1]])
        by = np.lexsort((order, keys))
        self._keys = keys[by]
        self._sources = np.concatenate([computed[2], received[2]])[by]

    def _key(self, name: Int64, group: Int64, block: Int64) -> Int64:
        keys: Int64 = (name * len(self._rooms.groups) + group) * len(self._part.blocks) + block
        return keys

    def to_messages(self, sends: Fields, at: Int64) -> Table:
        name, group, block = sends.name[at], sends.group[at], sends.block[at]
        targets = np.zeros((len(at), len(Target)), np.int64)
        start = message_starts(self._rooms, "send")[sends.phase[at]]
        targets[:, Target.RESULT], targets[:, Target.AT] = OWN, start + sends.offset[at]
        targets[:, Target.HEADS] = self._widths.items[name, group] // self._rooms.shape.head_dim
        targets[:, Target.COUNT] = self._part.blocks.tokens[block]
        targets[:, Target.LSE] = start + _lse_offsets(sends)[sends.entry[at]]
        return self._with_sources(targets, self._key(name, group, block))

    def _with_sources(self, targets: Int64, keys: Int64) -> Table:
        """The sources of these targets alone, in their order."""
        first, end = (np.searchsorted(self._keys, keys, side) for side in ("left", "right"))
        count = end - first
        starts = np.cumsum(count) - count
        chosen = np.repeat(first - starts, count) + np.arange(count.sum())
        targets[:, Target.FIRST], targets[:, Target.NUM] = starts, count
        return targets, self._sources[chosen]

    def to_results(self) -> Table:
        targets, keys = [], []
        for group, (q_heads, kv_heads) in enumerate(self._rooms.heads):
            for space in Space:
                heads = q_heads if space is Space.Q else kv_heads
                for name in OUTPUTS[self._lowered.direction][space]:
                    for row, count, key in self._own_rows(space, group, name):
                        target = np.zeros(len(Target), np.int64)
                        target[Target.RESULT] = RESULTS[name]
                        target[Target.AT] = self._first_row + row
                        target[Target.HEAD] = heads.start
                        target[Target.HEADS] = heads.stop - heads.start
                        target[Target.COUNT] = count
                        targets.append(target)
                        keys.append(key)
        if not targets:
            return np.zeros((0, len(Target)), np.int64), self._sources[:0]
        return self._with_sources(np.stack(targets), np.asarray(keys, np.int64))

    def _own_rows(self, space: Space, group: int, name: str) -> list[tuple[int, int, int]]:
        """First row, rows and key of what the executor writes: of results that lie in rooms all
        rows, otherwise those that no call writes."""
        part, code = self._part, NAMES.index(name)
        block, runs = part.local_blocks, self._runs(space, group)
        if runs and self._rooms.has(f"{name}_sums", group):
            rows = [
                (start, count, self._run_key(code, group, i))
                for i, (start, count, *_) in enumerate(runs)
            ]
        else:
            key = self._key(np.full(len(block), code), np.full(len(block), group), block)
            in_room = self._rooms.residence[group].results[space]
            listed = zip(
                part.block_row[block].tolist(),
                part.blocks.tokens[block].tolist(),
                key.tolist(),
                self._is_computed(space, group, block).tolist(),
                strict=True,
            )
            rows = [(row, count, k) for row, count, k, by_call in listed if in_room or not by_call]
        if part.local_rows > part.local_tokens:
            padding = part.local_rows - part.local_tokens
            rows.append((part.local_tokens, padding, NO_SOURCES))
        return rows

    def _runs(self, space: Space, group: int) -> list[SequenceRows]:
        """Whole sequences, where the kernel keeps each from a border of its kernel tiles on."""
        return sequence_rows(self._lowered, group, self._kernel, self._rooms.shape.head_dim, space)

    def _run_key(self, name: int, group: int, index: int) -> int:
        return OF_RUNS + (name * len(self._rooms.groups) + group) * OF_RUNS + index

    def _is_computed(self, space: Space, group: int, block: Int64) -> Bool:
        found = self._lowered.found
        mine = (found.space == space) & (found.head_group == group)
        return np.isin(block, found.block[mine])

    def _received(self, receives: Fields) -> tuple[Int64, Int64, Int64]:
        """Keys, order and sources of results that were received."""
        at = np.flatnonzero(IS_RESULT[receives.name])
        name, group, block = receives.name[at], receives.group[at], receives.block[at]
        start = message_starts(self._rooms, "receive")[receives.phase[at]]
        width = self._widths.items[name, group]
        sources = np.zeros((len(at), len(Source)), np.int64)
        sources[:, Source.FORM] = Form.PARTIAL
        sources[:, Source.AT], sources[:, Source.ROW] = start + receives.offset[at], width
        sources[:, Source.LSE] = start + _lse_offsets(receives)[receives.entry[at]]
        sources[:, Source.LSE_ROW] = width // self._rooms.shape.head_dim
        sources[:, Source.LSE_HEAD] = 1
        return self._key(name, group, block), receives.entry[at], sources

    def _computed(self) -> tuple[Int64, Int64, Int64]:
        """Keys, order and sources of what this rank's calls leave in rooms."""
        keys, order, sources = [], [], []
        for group in range(len(self._rooms.groups)):
            for space in Space:
                for name in OUTPUTS[self._lowered.direction][space]:
                    if not self._rooms.residence[group].results[space]:
                        continue
                    for part in self._sources_of(space, group, name):
                        keys.append(part[0])
                        order.append(part[1])
                        sources.append(part[2])
        none = np.zeros(0, np.int64)
        return (
            np.concatenate([none, *keys]),
            np.concatenate([none, *order]),
            np.concatenate([np.zeros((0, len(Source)), np.int64), *sources]),
        )

    def _sources_of(
        self, space: Space, group: int, name: str
    ) -> Iterator[tuple[Int64, Int64, Int64]]:
        style, backward = self._lowered.style, self._lowered.backward
        if self._rooms.has(f"{name}_sums", group):
            yield self._panels(space, group, name)
        elif style.collects if backward else not style.merges:
            yield from self._by_call(space, group, name)
        else:
            yield self._merged(space, group, name)

    def _contributions(self, space: Space, group: int) -> tuple[Bool, Int64, Int64]:
        """Which contributions are these, their blocks, and the rows where they begin."""
        found = self._lowered.found
        mine = (found.space == space) & (found.head_group == group)
        block = found.block[mine]
        return mine, block, self._lowered.place[space, group, block]

    def _merged(self, space: Space, group: int, name: str) -> tuple[Int64, Int64, Int64]:
        """One source per block: where its last call left the sum."""
        mine, block, place = self._contributions(space, group)
        found = self._lowered.found
        last = np.append(block[1:] != block[:-1], True)[: len(block)]
        block, place, wide = block[last], place[last], found.wide[mine][last]
        width = int(self._widths.items[NAMES.index(name), group])
        sources = np.zeros((len(block), len(Source)), np.int64)
        room = f"{name}_wide" if self._rooms.has(f"{name}_wide", group) else name
        for chosen, form, of, size in (
            (wide, Form.WIDE, room, self._wide),
            (~wide, Form.INPUT, name, self._item),
        ):
            at = self._rooms.at(of, group) + place[chosen] * width * size
            sources[chosen, Source.FORM], sources[chosen, Source.AT] = form, at
        sources[:, Source.ROW] = width
        if name == "out":
            sources[:, Source.LSE] = self._rooms.at("lse", group) + place * self._wide
            sources[:, Source.LSE_ROW] = 1
            sources[:, Source.LSE_HEAD] = self._rooms.head_stride("lse", group)
        code = np.full(len(block), NAMES.index(name))
        return self._key(code, np.full(len(block), group), block), 0 * block, sources

    def _by_call(self, space: Space, group: int, name: str) -> Iterator[tuple[Int64, Int64, Int64]]:
        """One source per call and block that it touches."""
        mine, block, place = self._contributions(space, group)
        time = self._lowered.found.time[mine]
        divisions = {at: d for at, (op, d) in enumerate(self._lowered.instructions)
                     if op is Op.COMPUTE}  # fmt: skip
        rows = call_rows(
            self._part,
            self._lowered.mask,
            self._lowered.program,
            self._lowered.place,
            self._lowered.style.row_multiple,
        )
        width = int(self._widths.items[NAMES.index(name), group])
        for at in np.unique(time).tolist():
            division, now = divisions[at], time == at
            row = place[now] - rows[division, group][space].start
            sources = np.zeros((len(row), len(Source)), np.int64)
            start = self._rooms.at(f"{name}_call", group, division)
            sources[:, Source.FORM] = Form.INPUT
            sources[:, Source.AT], sources[:, Source.ROW] = start + row * width * self._item, width
            if name == "out":
                start = self._rooms.at("lse_call", group, division)
                sources[:, Source.LSE] = start + row * self._wide
                sources[:, Source.LSE_ROW] = 1
                sources[:, Source.LSE_HEAD] = self._rooms.head_stride("lse_call", group, division)
            code = np.full(len(row), NAMES.index(name))
            key = self._key(code, np.full(len(row), group), block[now])
            yield key, np.full(len(row), at), sources

    def _panels(self, space: Space, group: int, name: str) -> tuple[Int64, Int64, Int64]:
        """One source per block, or per whole sequence. Slots that get another block are cleared."""
        code, room = NAMES.index(name), f"{name}_sums"
        runs = self._runs(space, group)
        if runs:
            row = np.asarray([place for _, _, place, _ in runs], np.int64)
            key = np.asarray([self._run_key(code, group, i) for i in range(len(runs))], np.int64)
            cleared = np.zeros(len(row), np.int64)
        else:
            _, block, _ = self._contributions(space, group)
            block = np.unique(block)
            row = self._lowered.place[space, group, block]
            key = self._key(np.full(len(block), code), np.full(len(block), group), block)
            side = self._lowered.style.row_multiple
            slot_rows = -(-self._part.blocks.tokens[block].astype(np.int64) // side) * side
            cleared = slot_rows * np.isin(block, _refilled(self._lowered, space, group))
        sources = np.zeros((len(row), len(Source)), np.int64)
        sources[:, Source.FORM], sources[:, Source.AT] = Form.PANELS, self._rooms.at(room, group)
        sources[:, Source.ROW] = self._rooms.head_stride(room, group)
        sources[:, Source.PANEL_ROW] = row
        sources[:, Source.DIM] = self._rooms.rooms[room, group, -1].shape[2]
        sources[:, Source.SCALED], sources[:, Source.CLEARED] = name != "dv", cleared
        return key, 0 * row, sources


def _lse_offsets(fields: Fields) -> Int64:
    """Of the log-sum-exps of each payload, by entry; 0 where it has none."""
    offsets = np.zeros(int(fields.entry.max(initial=-1)) + 1, np.int64)
    with_lse = fields.name == LSE
    offsets[fields.entry[with_lse]] = fields.offset[with_lse]
    return offsets


def _refilled(lowered: LoweredProgram, space: Space, group: int) -> Int64:
    """Blocks in slots whose rows, in whole kernel tiles, hold another block later."""
    slots, (earlier, _) = lowered.program.slots, lowered.refills
    mine = (slots.space[earlier] == space) & (slots.head_group[earlier] == group)
    blocks: Int64 = slots.block[earlier[mine]].astype(np.int64)
    return blocks
