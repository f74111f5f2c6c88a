"""Row work: tables of what is copied and what is added up in a call, and when.

Local rows are copied into workspaces and messages at the start, received ones into their slots and
on into other messages when they are there. Contributions to rows that leave are added up when the
last of them is there, those to local rows at the end of the call.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.executor.layout import (
    DELTA,
    INPUT_NAMES,
    IS_KEY,
    IS_PER_HEAD,
    IS_RESULT,
    LSE,
    NAMES,
    PayloadFields,
    RankLayout,
    dtypes_of,
)
from dyncp.executor.order import START, ready_times
from dyncp.kernels import IndexArrays, RowOps
from dyncp.kernels.kernel import SequenceRows
from dyncp.kernels.row_ops import (
    IN_MEMORY,
    Copy,
    CopyLaunch,
    Form,
    Kind,
    RowSum,
    RowSumLaunch,
    Source,
    SumLaunch,
    SumTable,
    Target,
)
from dyncp.plan import AttentionShape, Op, Space
from dyncp.plan.buffers import OUTPUTS, times_of

# Results in the order in which the caller gets them.
RESULTS = {"out": 0, "dq": 0, "dk": 1, "dv": 2}


@dataclass(frozen=True, eq=False)
class RankCall:
    """A call on one rank. `copies` and `sums` are launches by the time at which they are due: after
    instruction i, at the START, or at the end. `row_sums` comes before all of them (backward)."""

    layout: RankLayout
    copies: Mapping[int, CopyLaunch]
    sums: Mapping[int, SumLaunch]
    row_sums: RowSumLaunch | None
    ready: Mapping[int, int]  # phase → time after which it may be launched


def make_rank_call(
    program: LoweredProgram,
    shape: AttentionShape,
    row_ops: RowOps,
    arrays: IndexArrays,
    base: int = 0,
    first_row: int = 0,
) -> RankCall:
    """`base` and `first_row` as in `RankLayout`."""
    layout, ready = RankLayout(program, shape, base, first_row), ready_times(program)
    dtypes, dim, backward = dtypes_of(shape), shape.head_dim, program.backward
    copies = {
        time: row_ops.copy(table, dim, dtypes, arrays)
        for time, table in list_copies(layout).items()
    }
    sums = {
        time: row_ops.combine(table, dim, dtypes, arrays, has_lse=not backward)
        for time, table in list_sums(layout, ready).items()
    }
    row_sums = None
    if backward:
        base_2 = program.style.collects
        row_sums = row_ops.row_sums(list_row_sums(layout), dtypes, arrays, base_2=base_2)
    return RankCall(layout, copies, sums, row_sums, ready)


def _table(columns: type[IntEnum], **values: Int64 | Int32 | Bool | int) -> Int64:
    """int64[rows, columns] from columns by name, which may be equal in all rows; others are 0."""
    arrays = np.broadcast_arrays(*(np.atleast_1d(value) for value in values.values()))
    table = np.zeros((len(arrays[0]), len(columns)), np.int64)
    for name, array in zip(values, arrays, strict=True):
        table[:, columns[name]] = array
    return table


def list_copies(layout: RankLayout) -> dict[int, Int64]:
    """int64[copies, columns of `Copy`] by time; only times at which something is copied."""
    program, sends, receives = layout.program, layout.sends, layout.receives
    inputs = sends.inputs(backward=program.backward)
    local = program.part.blocks.owner[sends.block] == program.part.rank
    arrived = np.flatnonzero(receives.inputs(backward=program.backward))
    waits = np.append(times_of(program.program, Op.WAIT), 0)
    relayed = np.flatnonzero(inputs & ~local)
    came_in = np.zeros((len(program.program.receives), len(NAMES)), np.int64)
    came_in[receives.entry, receives.name] = np.arange(len(receives.entry))
    came = came_in[program.relayed_from[sends.entry[relayed]], sends.name[relayed]]
    packed = _packed(layout, np.flatnonzero(inputs & local))
    at_start = np.concatenate([_local_rows(layout), _gaps(layout), packed])
    copies = np.concatenate(
        [at_start, _unpacked(layout, arrived), _passed_on(layout, relayed, came)]
    )
    phases = receives.phase[np.append(arrived, came)]
    times = np.append(np.full(len(at_start), START), waits[phases])
    some = copies[:, Copy.COUNT] > 0
    times, copies = times[some], copies[some]
    return {int(time): copies[times == time] for time in np.unique(times)}


def _local_rows(layout: RankLayout) -> Int64:
    """Of the inputs that are copied into workspaces."""
    name, group = np.nonzero(layout.start[: len(INPUT_NAMES)] >= 0)
    width = layout.items[name, group]
    return _table(
        Copy,
        COUNT=layout.program.part.local_tokens,
        WIDTH=width,
        SOURCE=name,
        FROM=layout.first_row,
        COLUMN=layout.first_item(name, group),
        TO=layout.start[name, group],
        TO_ROW=width,
    )


def _gaps(layout: RankLayout) -> Int64:
    """Padding rows of kernel tiles have weight 0, but 0 × NaN is NaN, so they are cleared: those
    behind the last local row, and behind the last row of every slot."""
    parts = [np.zeros((0, len(Copy)), np.int64)]
    for name, group in np.argwhere(layout.start[: len(INPUT_NAMES)] >= 0).tolist():
        first, end = layout.program.unused_rows(Space(int(IS_KEY[name])), group)
        width = layout.items[name, group]
        to = layout.start[name, group] + first * width * layout.item_bytes[name]
        columns = {"COUNT": end - first, "WIDTH": width, "TO": to, "TO_ROW": width}
        parts.append(_table(Copy, KIND=Kind.ZEROS, SOURCE=IN_MEMORY, **columns))
    return np.concatenate(parts)


def _packed(layout: RankLayout, at: Int64) -> Int64:
    """Local rows into messages. Row sums are made beforehand, where the kernel reads them."""
    sends = layout.sends
    name, group = sends.name[at], sends.group[at]
    row = layout.program.part.block_row[sends.block[at]]
    is_delta, wide = name == DELTA, layout.shape.accumulator_bytes
    return _table(
        Copy,
        **_sizes(layout, sends, at),
        **_in_message(layout, sends, at, "TO"),
        SOURCE=np.where(is_delta, IN_MEMORY, name),
        FROM=np.where(is_delta, layout.start[DELTA, group] + row * wide, layout.first_row + row),
        FROM_ROW=is_delta,
        FROM_HEAD=np.where(is_delta, layout.stride[DELTA, group], 0),
        COLUMN=np.where(is_delta, 0, layout.first_item(name, group)),
    )


def _unpacked(layout: RankLayout, at: Int64) -> Int64:
    """Received inputs into their slots."""
    receives = layout.receives
    sizes = _sizes(layout, receives, at)
    name, group = receives.name[at], receives.group[at]
    per_head, width = IS_PER_HEAD[name], sizes["WIDTH"]
    row = layout.program.place[IS_KEY[name].astype(np.int64), group, receives.block[at]]
    if layout.program.style.collects:
        sizes["KIND"] = np.where(name == LSE, Kind.BASE_2, sizes["KIND"])
    row_bytes = np.where(per_head, 1, width) * layout.item_bytes[name]
    return _table(
        Copy,
        **sizes,
        **_in_message(layout, receives, at, "FROM"),
        SOURCE=IN_MEMORY,
        TO=layout.start[name, group] + row * row_bytes,
        TO_ROW=np.where(per_head, 1, width),
        TO_HEAD=layout.stride[name, group],
    )


def _passed_on(layout: RankLayout, at: Int64, came: Int64) -> Int64:
    """Received inputs into other messages, directly from the one that they came in."""
    target = _in_message(layout, layout.sends, at, "TO")
    source = _in_message(layout, layout.receives, came, "FROM")
    return _table(Copy, **_sizes(layout, layout.sends, at), **source, **target, SOURCE=IN_MEMORY)


def _sizes(layout: RankLayout, fields: PayloadFields, at: Int64) -> dict[str, Int64]:
    name = fields.name[at]
    return {
        "KIND": np.where(IS_PER_HEAD[name], Kind.PER_HEAD, Kind.ROWS),
        "COUNT": layout.program.part.blocks.tokens[fields.block[at]].astype(np.int64),
        "WIDTH": layout.items[name, fields.group[at]],
    }


def _in_message(
    layout: RankLayout, fields: PayloadFields, at: Int64, end: str
) -> dict[str, Int64 | int]:
    """Columns of the `end` of a copy (FROM or TO) that is in a message."""
    row = layout.items[fields.name[at], fields.group[at]]
    return {end: fields.at[at], f"{end}_ROW": row, f"{end}_HEAD": 1}


def list_row_sums(layout: RankLayout) -> Int64:
    """int64[rows, columns of `RowSum`] of local rows, which lie in order; sequences that a kernel
    wants on borders of its kernel tiles each by itself."""
    program, dim, wide = layout.program, layout.shape.head_dim, layout.shape.accumulator_bytes
    tokens = program.part.local_tokens
    parts = [np.zeros((0, len(RowSum)), np.int64)]
    for group in range(layout.num_groups):
        all_rows = [SequenceRows(0, tokens, 0, tokens)]
        sequences = program.sequence_rows(Space.Q, group, dim) or all_rows
        first, count, place, padded = np.asarray(sequences, np.int64).T
        heads = layout.heads("q", group)
        columns = {
            "ROW": layout.first_row + first,
            "HEAD": heads.start,
            "HEADS": heads.stop - heads.start,
            "COUNT": count,
            "PADDED": padded,
            "DELTA": layout.start[DELTA, group] + place * wide,
            "LSE": layout.start[LSE, group] + place * wide,
            "STRIDE": layout.stride[LSE, group],
        }
        parts.append(_table(RowSum, **columns))
    return np.concatenate(parts)


def list_sums(layout: RankLayout, ready: Mapping[int, int]) -> dict[int, SumTable]:
    """What is added up, by time; for local rows at the end of the program. Results leave when the
    phase that takes them is `ready`."""
    builder, sends, tables = _Sums(layout), layout.sends, {}
    leaving = np.flatnonzero(IS_RESULT[sends.name])
    times = np.asarray([ready[phase] for phase in sends.phase[leaving].tolist()], np.int64)
    for time in np.unique(times).tolist():
        tables[time] = builder.to_messages(leaving[times == time])
    at_end = builder.to_results()
    if len(at_end[0]):
        tables[len(layout.program.instructions)] = at_end
    return tables


AFTER_CALLS = 1 << 40  # received contributions come after computed ones
SEQUENCES = 1 << 31  # from here on, numbers are those of sequences instead of blocks
NO_SOURCES = -1


class _Sums:
    """Contributions have keys: name, head group, and block or sequence."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout, self._program, self._part = layout, layout.program, layout.program.part
        self._names = [
            (name, space) for space in Space for name in OUTPUTS[layout.program.direction][space]
        ]
        parts = [self._received(), *self._computed()]
        keys, order, sources = (np.concatenate(column) for column in zip(*parts, strict=True))
        by = np.lexsort((order, keys))
        self._keys, self._sources = keys[by], sources[by]

    def _key(self, name: Int64 | int, group: Int64 | int, number: Int64) -> Int64:
        keys: Int64 = ((name * self._layout.num_groups + group) << 32) + number
        return keys

    def to_messages(self, at: Int64) -> SumTable:
        sends, layout = self._layout.sends, self._layout
        name, group, block = sends.name[at], sends.group[at], sends.block[at]
        targets = _table(
            Target,
            RESULT=IN_MEMORY,
            AT=sends.at[at],
            HEADS=layout.num_heads[name, group],
            COUNT=self._part.blocks.tokens[block],
            LSE=sends.lse_of_entry()[sends.entry[at]],
        )
        return self._with_sources(targets, self._key(name, group, block))

    def to_results(self) -> SumTable:
        targets, keys = [np.zeros((0, len(Target)), np.int64)], [np.zeros(0, np.int64)]
        for name, space in self._names:
            for group in range(self._layout.num_groups):
                row, count, key = self._local_rows(name, space, group)
                heads = self._layout.heads(name, group)
                columns = {
                    "RESULT": RESULTS[name],
                    "AT": self._layout.first_row + row,
                    "HEAD": heads.start,
                    "HEADS": heads.stop - heads.start,
                    "COUNT": count,
                }
                targets.append(_table(Target, **columns))
                keys.append(key)
        return self._with_sources(np.concatenate(targets), np.concatenate(keys))

    def _with_sources(self, targets: Int64, keys: Int64) -> SumTable:
        """The sources of these targets alone, in their order."""
        first, end = (np.searchsorted(self._keys, keys, side) for side in ("left", "right"))
        count = end - first
        starts = np.cumsum(count) - count
        chosen = np.repeat(first - starts, count) + np.arange(count.sum())
        targets[:, Target.FIRST], targets[:, Target.NUM] = starts, count
        return targets, self._sources[chosen]

    def _local_rows(self, name: str, space: Space, group: int) -> tuple[Int64, Int64, Int64]:
        """First row, rows and key of what the executor writes: of results that calls leave in
        buffers all rows, otherwise those that no call writes."""
        part, code = self._part, NAMES.index(name)
        sequences = self._sequences(name, space, group)
        if sequences:
            row, count = np.asarray(sequences, np.int64).T[:2]
            key = self._key(code, group, SEQUENCES + np.arange(len(sequences)))
        else:
            block = part.local_blocks
            if not self._layout.has_buffer(name, group):
                block = block[~np.isin(block, self._blocks(space, group))]
            row, count = part.block_row[block], part.blocks.tokens[block]
            key = self._key(code, group, block)
        if part.local_rows > part.local_tokens:
            row = np.append(row, part.local_tokens)
            count = np.append(count, part.local_rows - part.local_tokens)
            key = np.append(key, NO_SOURCES)
        return row, count, key

    def _sequences(self, name: str, space: Space, group: int) -> list[SequenceRows]:
        """Whole sequences, where sums keep each from a border of kernel tiles on."""
        if (f"{name}_sums", group, -1) not in self._layout.starts:
            return []
        return self._program.sequence_rows(space, group, self._layout.shape.head_dim)

    def _blocks(self, space: Space, group: int) -> Int64:
        """Blocks that calls contribute to."""
        added = self._program.contributions
        mine = (added.space == space) & (added.head_group == group)
        return np.unique(added.block[mine])

    def _received(self) -> tuple[Int64, Int64, Int64]:
        """Keys, order and sources of results that were received."""
        receives, layout = self._layout.receives, self._layout
        at = np.flatnonzero(IS_RESULT[receives.name])
        name, group, entry = receives.name[at], receives.group[at], receives.entry[at]
        sources = _table(
            Source,
            FORM=Form.PARTIAL,
            AT=receives.at[at],
            ROW=layout.items[name, group],
            LSE=receives.lse_of_entry()[entry],
            LSE_ROW=layout.num_heads[name, group],
            LSE_HEAD=1,
        )
        return self._key(name, group, receives.block[at]), AFTER_CALLS + entry, sources

    def _computed(self) -> Iterator[tuple[Int64, Int64, Int64]]:
        """Keys, order and sources of what this rank's calls leave in buffers."""
        style, added = self._program.style, self._program.contributions
        merges = not style.collects if self._program.backward else style.merges
        for name, space in self._names:
            at = np.flatnonzero(added.space == space)
            if (self._layout.starts_of(f"{name}_sums") >= 0).any():
                for group in range(self._layout.num_groups):
                    yield self._from_sums(name, space, group)
                continue
            if merges:  # the last call leaves the sum
                at = at[np.append(added.first[1:], True)[at]]
            staged, sources = self._from_calls(name, space, at, merges=merges)
            key = self._key(NAMES.index(name), added.head_group[at], added.block[at])
            yield key[staged], added.time[at][staged], sources[staged]

    def _from_calls(
        self, name: str, space: Space, at: Int64, *, merges: bool
    ) -> tuple[Bool, Int64]:
        """Sources of these contributions, and which of them there are: others are in the caller's
        tensors. Sums of all calls lie in a workspace, the results of one in a buffer of its own."""
        layout, shape, added = self._layout, self._layout.shape, self._program.contributions
        group, wide = added.head_group[at], added.wide[at] & merges
        row = self._program.place[space, group, added.block[at]]
        if merges:
            start, other = layout.starts_of(name)[group], layout.starts_of(f"{name}_wide")[group]
            staged, start = start >= 0, np.where(wide & (other >= 0), other, start)
            lse, stride = layout.start[LSE, group], layout.stride[LSE, group]
        else:
            start, lse, stride, first_row = self._call_buffers(name, space)[added.time[at], group].T
            staged, row = start >= 0, row - first_row
        width = layout.items[NAMES.index(name), group]
        size = np.where(wide, shape.accumulator_bytes, shape.item_bytes)
        sources = _table(
            Source,
            FORM=np.where(wide, Form.WIDE, Form.INPUT),
            AT=start + row * width * size,
            ROW=width,
            LSE=lse + row * shape.accumulator_bytes,
            LSE_ROW=1,
            LSE_HEAD=stride,
        )
        return staged, sources

    def _call_buffers(self, name: str, space: Space) -> Int64:
        """By a call's instruction and head group: where its results and their log-sum-exps begin,
        the stride of heads of the latter, and the first row."""
        program, layout = self._program, self._layout
        buffers = np.full((len(program.instructions), layout.num_groups, 4), -1, np.int64)
        times = times_of(program.program, Op.COMPUTE)
        for (division, group), rows in program.call_rows.items():
            buffers[times[division], group] = (
                layout.starts.get((f"{name}_call", group, division), -1),
                layout.starts.get(("lse_call", group, division), -1),
                layout.head_stride("lse_call", group, division),
                rows[space].start,
            )
        return buffers

    def _from_sums(self, name: str, space: Space, group: int) -> tuple[Int64, Int64, Int64]:
        """One source per block, or per whole sequence. Slots that get another block are cleared."""
        layout, program, buffer = self._layout, self._program, (f"{name}_sums", group, -1)
        sequences = self._sequences(name, space, group)
        if sequences:
            row = np.asarray(sequences, np.int64).T[2]
            cleared = np.zeros_like(row)
            number = SEQUENCES + np.arange(len(sequences))
        else:
            number = self._blocks(space, group)
            row, side = program.place[space, group, number], program.style.row_multiple
            slot_rows = -(-self._part.blocks.tokens[number].astype(np.int64) // side) * side
            cleared = slot_rows * np.isin(number, program.refilled_blocks(space, group))
        columns = {
            "FORM": Form.PANELS,
            "AT": layout.starts[buffer],
            "ROW": layout.head_stride(*buffer),
            "PANEL_ROW": row,
            "DIM": layout.buffers[buffer].shape[2],
            "SCALED": name != "dv",
            "CLEARED": cleared,
        }
        key = self._key(NAMES.index(name), group, number)
        return key, np.zeros(len(row), np.int64), _table(Source, **columns)
