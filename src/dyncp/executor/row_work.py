"""Row work: tables of the copies and sums of a call, and when they are due.

Local rows are copied into workspaces and messages at the start of the call, received rows into
their slots, and into messages that relay them, when they arrive. Contributions to rows of other
ranks are added up and sent as soon as the last one is known; those to local rows at the end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dyncp.arrays import Bool, Int32, Int64, ranges_of, starts_of
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

# Indices of the results in `Results.rows`.
RESULTS = {"out": 0, "dq": 0, "dk": 1, "dv": 2}


@dataclass(frozen=True, eq=False)
class RankCall:
    """A call on one rank. `copies` and `sums` map times to launches: after instruction i, at START,
    or at the end (the number of instructions). In backward, `row_sums` precedes all of them."""

    layout: RankLayout
    copies: Mapping[int, CopyLaunch]
    sums: Mapping[int, SumLaunch]
    row_sums: RowSumLaunch | None
    ready: Mapping[int, int]  # phase → time after which it can be launched


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
    """int64[rows, columns] from columns by name; scalars fill a column, missing columns are 0."""
    arrays = np.broadcast_arrays(*(np.atleast_1d(value) for value in values.values()))
    table = np.zeros((len(arrays[0]), len(columns)), np.int64)
    for name, array in zip(values, arrays, strict=True):
        table[:, columns[name]] = array
    return table


def list_copies(layout: RankLayout) -> dict[int, Int64]:
    """Tables int64[copies, columns of `Copy`] by time; only times with copies."""
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
    """Copies local rows of the caller's inputs into workspaces."""
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
    """Clears the padding rows of kernel tiles, after the last local row and after the last row of
    every slot: their weight is 0, but 0 × NaN is NaN."""
    parts = [np.zeros((0, len(Copy)), np.int64)]
    for name, group in np.argwhere(layout.start[: len(INPUT_NAMES)] >= 0).tolist():
        first, end = layout.program.unused_rows(Space(int(IS_KEY[name])), group)
        width = layout.items[name, group]
        to = layout.start[name, group] + first * width * layout.item_bytes[name]
        columns = {"COUNT": end - first, "WIDTH": width, "TO": to, "TO_ROW": width}
        parts.append(_table(Copy, KIND=Kind.ZEROS, SOURCE=IN_MEMORY, **columns))
    return np.concatenate(parts)


def _packed(layout: RankLayout, at: Int64) -> Int64:
    """Copies local rows into messages. Row sums have already been computed, in the workspace."""
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
    """Copies received inputs into their slots."""
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
    """Copies received inputs into messages that relay them, directly from the received message."""
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
    """The columns of a copy for the `end` (FROM or TO) that is in a message."""
    row = layout.items[fields.name[at], fields.group[at]]
    return {end: fields.at[at], f"{end}_ROW": row, f"{end}_HEAD": 1}


def list_row_sums(layout: RankLayout) -> Int64:
    """int64[entries, columns of `RowSum`]: one entry with all local rows, or one per sequence if
    the kernel aligns sequences to its tiles."""
    program, dim, wide = layout.program, layout.shape.head_dim, layout.shape.accumulator_bytes
    tokens, parts = program.part.local_tokens, []
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
    """Tables of sums by time. Rows of other ranks are due when the phase that sends them is
    `ready`, local rows at the end of the program."""
    builder, sends, tables = _Sums(layout), layout.sends, {}
    leaving = np.flatnonzero(IS_RESULT[sends.name])
    times = np.asarray([ready[phase] for phase in sends.phase[leaving].tolist()], np.int64)
    for time in np.unique(times).tolist():
        tables[time] = builder.to_messages(leaving[times == time])
    at_end = builder.to_results()
    if len(at_end[0]):
        tables[len(layout.program.instructions)] = at_end
    return tables


AFTER_CALLS = 1 << 40  # received contributions are added after computed ones
SEQUENCES = 1 << 31  # numbers of sequences start here, numbers of blocks are smaller
NO_SOURCES = -1


class _Sums:
    """Finds the contributions to each target by keys of name, head group, and block or sequence."""

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
        targets, keys = [], []
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
        """The targets with their sources, in order of addition."""
        first, end = (np.searchsorted(self._keys, keys, side) for side in ("left", "right"))
        count = end - first
        targets[:, Target.FIRST], targets[:, Target.NUM] = starts_of(count)[:-1], count
        return targets, self._sources[ranges_of(first, count)]

    def _local_rows(self, name: str, space: Space, group: int) -> tuple[Int64, Int64, Int64]:
        """First row, number of rows and key of the local rows that the executor writes. If calls
        write to buffers, these are all rows; otherwise only rows that no call writes."""
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
        """The rows of each sequence, if sums hold whole sequences, each aligned to kernel tiles."""
        if (f"{name}_sums", group, -1) not in self._layout.starts:
            return []
        return self._program.sequence_rows(space, group, self._layout.shape.head_dim)

    def _blocks(self, space: Space, group: int) -> Int64:
        """Blocks that calls contribute to."""
        added = self._program.contributions
        mine = (added.space == space) & (added.head_group == group)
        return np.unique(added.block[mine])

    def _received(self) -> tuple[Int64, Int64, Int64]:
        """Keys, order and sources of received results."""
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
        """Keys, order and sources of results that this rank's calls write to buffers."""
        added, merges = self._program.contributions, self._program.calls_depend
        for name, space in self._names:
            at = np.flatnonzero(added.space == space)
            if (self._layout.starts_of(f"{name}_sums") >= 0).any():
                for group in range(self._layout.num_groups):
                    yield self._from_sums(name, space, group)
                continue
            if merges:  # the last call to touch a block writes the sum
                at = at[np.append(added.first[1:], True)[at]]
            staged, sources = self._from_calls(name, space, at, merges=merges)
            key = self._key(NAMES.index(name), added.head_group[at], added.block[at])
            yield key[staged], added.time[at][staged], sources[staged]

    def _from_calls(
        self, name: str, space: Space, at: Int64, *, merges: bool
    ) -> tuple[Bool, Int64]:
        """Sources of these contributions, and which of them are in buffers; the others are in the
        caller's tensors. Sums of all calls are in a workspace; calls that do not merge have a
        buffer each."""
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
        """For each instruction and head group: the offset of the call's results, the offset and the
        head stride of their log-sum-exps, and the first row."""
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
        """One source per block or sequence. Slots that will be filled again are cleared."""
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
