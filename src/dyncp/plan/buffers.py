"""Workspaces and buffers of one attention call on a rank: where blocks are stored, which rows the
kernel calls touch and what they contribute to each block, and the tensors and message buffers.

A kernel call contributes to the rows of every block that it touches. Received results for the same
rows are added after the last call, when the sum is sent or the attention call ends. A single
contribution needs no sum.

The caller's tensors (q, k, v, out, their gradients) are read and written in place if no block is
received into them and no graph needs fixed addresses. Otherwise they are copied to a buffer that
also has rows for received blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from dyncp.arrays import Bool, Columns, Int32, Int64, frozen
from dyncp.blocks import IS_INPUT, OF_KEYS, AttentionShape, Direction, HeadGroup
from dyncp.plan.format import MaskPlan, Messages, Op, Program, RankPlan, Space

PER_HEAD_ROWS = 128  # rows of per-head values are padded to whole kernel tiles, for vector loads
ALIGNMENT = 256  # bytes: the start of every buffer, for GPU memory transactions
MESSAGE_ALIGNMENT = 16  # bytes: the start of every peer's message, for vector loads
INPUTS: dict[Direction, dict[Space, tuple[str, ...]]] = {
    Direction.FORWARD: {Space.Q: ("q",), Space.KV: ("k", "v")},
    Direction.BACKWARD: {Space.Q: ("q", "dout"), Space.KV: ("k", "v")},
}
OUTPUTS: dict[Direction, dict[Space, tuple[str, ...]]] = {
    Direction.FORWARD: {Space.Q: ("out",), Space.KV: ()},
    Direction.BACKWARD: {Space.Q: ("dq",), Space.KV: ("dk", "dv")},
}
SUMS = ("dq_sums", "dk_sums", "dv_sums")
# Buffers that are zeroed at the start of a call: sums, and per-head values with padding rows.
CLEARED = (*SUMS, "lse", "delta")


@dataclass(frozen=True, slots=True)
class KernelStyle:
    """The properties of a kernel, and of how it is run, that determine the memory of a call.

    `merges`: forward calls merge their outputs with those of earlier calls. Otherwise each call
    writes an output of its own, for all rows of the kernel tiles that it touches.
    `collects`: backward calls of a program add gradients to common fp32 sums in the kernel's own
    layout, with rows padded to `row_multiple` and head dims to `dim_multiple`. If a rank has no
    messages and a single call, that call may consist of up to `most_sequences` whole sequences,
    each of which starts on a multiple of `row_multiple`.
    `fixed`: if there are messages, inputs and results are copied to and from the executor's own
    memory, so that the work in between can be replayed as graphs.
    """

    merges: bool = True
    collects: bool = False
    fixed: bool = False
    row_multiple: int = 1
    dim_multiple: int = 1
    most_sequences: int = 0


@dataclass(frozen=True, eq=False)
class Contributions(Columns):
    """What kernel calls add to blocks, ordered by head group, space, block and `time`, the index of
    the call's instruction. `first` marks the first contribution to a block. `wide` says whether the
    sum stays in the accumulator dtype; the last contribution rounds it to the final dtype."""

    time: Int64
    space: Int64
    head_group: Int64
    block: Int64
    first: Bool
    wide: Bool


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor of head group `index`, or the messages of phase `index`. `call` is the division of
    the kernel call that writes it, or -1 if it belongs to no single call."""

    name: str
    index: int
    shape: tuple[int, ...]  # in memory: per-head values have heads first
    item_bytes: int
    rows: int = 0  # without padding, for per-head values only
    call: int = -1

    @property
    def num_bytes(self) -> int:
        return -(-self.item_bytes * prod(self.shape) // ALIGNMENT) * ALIGNMENT


class StyledProgram:
    """One direction of one mask on one rank, for kernels of one style."""

    def __init__(
        self, part: RankPlan, mask: MaskPlan, direction: Direction, style: KernelStyle | None = None
    ) -> None:
        self.part, self.mask, self.direction = part, mask, direction
        self.style = KernelStyle() if style is None else style
        self.program = mask.program(direction)
        self.backward = direction is Direction.BACKWARD
        self.has_messages = len(self.program.sends) + len(self.program.receives) > 0

    @cached_property
    def place(self) -> Int64:
        """First row of every block in each workspace, int64[spaces, head groups, blocks]; -1 if the
        block is neither local nor received."""
        place = np.tile(self.part.block_row, (len(Space), len(self.part.head_groups), 1))
        slots = self.program.slots
        place[slots.space, slots.head_group, slots.block] = slots.row
        return place

    @cached_property
    def call_rows(self) -> dict[tuple[int, int], tuple[slice, slice]]:
        """Query rows and key rows of every kernel call, by division and head group: from the first
        to the last kernel tile that it touches, at least two tiles if the workspace has two."""
        tiles, tokens = self.mask.tiles, self.part.blocks.tokens
        groups = len(self.part.head_groups)
        key = self.program.tile_division.astype(np.int64) * groups + tiles.head_group
        calls, of_call = np.unique(key, return_inverse=True)
        hulls = []
        for space, block in ((Space.Q, tiles.q_block), (Space.KV, tiles.k_block)):
            first = self.place[space, tiles.head_group, block]
            low = np.full(len(calls), np.iinfo(np.int64).max)
            high = np.zeros(len(calls), np.int64)
            np.minimum.at(low, of_call, first)
            np.maximum.at(high, of_call, first + tokens[block])
            rows = self.program.workspace_rows[space][calls % groups].astype(np.int64)
            hulls.append(_whole_tiles(low, high, rows, self.style.row_multiple))
        return {
            (call // groups, call % groups): (slice(*q), slice(*k))
            for call, q, k in zip(calls.tolist(), *(h.tolist() for h in hulls), strict=True)
        }

    @cached_property
    def contributions(self) -> Contributions:
        """The contributions of every call, one to each block that it touches."""
        tiles, program, shape = self.mask.tiles, self.program, self.part.shape
        num_blocks, num_steps = len(self.part.blocks), max(len(program.instructions), 1)
        at = times_of(program, Op.COMPUTE)[program.tile_division]
        sides = [(Space.Q, tiles.q_block)] + [(Space.KV, tiles.k_block)] * self.backward
        touched = [
            block_keys(space, tiles.head_group, block, num_blocks) * num_steps + at
            for space, block in sides
        ]
        key, time = np.divmod(np.unique(np.concatenate(touched)), num_steps)
        changes = np.diff(key, prepend=-1, append=-1) != 0
        place, block = np.divmod(key, num_blocks)
        group, space = np.divmod(place, len(Space))
        unfinished = result_keys(program.receives, num_blocks)
        if shape.partial_dtype not in (None, shape.dtype):  # sent from the wide sums
            unfinished = np.append(unfinished, result_keys(program.sends, num_blocks))
        wide = ~changes[1:] | np.isin(key, unfinished)
        return Contributions(time, space, group, block, changes[:-1], wide)

    def copies_inputs(self, group: int) -> list[bool]:
        """By workspace: whether a head group's inputs are copied to the executor's buffers, instead
        of being read from the caller's tensors."""
        fixed, rows = self.style.fixed and self.has_messages, self.part.local_rows
        return [fixed or int(n) > rows for n in self.program.workspace_rows[:, group]]

    def copies_results(self, group: int) -> list[bool]:
        """By workspace: whether a head group's results are copied from the executor's buffers. A
        kernel that merges writes them in place unless results are received; a kernel that does not
        merge writes the output in place if it makes a single call."""
        if self.backward and self.style.collects:
            return [True, True]
        received = self.program.receives
        of_group = ~IS_INPUT[received.kind] & (received.head_group == group)
        results = [
            copied or bool((of_group & (OF_KEYS[received.kind] == space)).any())
            for space, copied in enumerate(self.copies_inputs(group))
        ]
        if not self.backward and not self.style.merges:
            results[Space.Q] |= sum(g == group for _, g in self.call_rows) > 1
        return results

    def buffers(self, shape: AttentionShape) -> list[Buffer]:
        """All buffers of one call. Buffers that are cleared at its start are adjacent."""
        buffers: list[Buffer] = []
        for index, group in enumerate(self.part.groups_for(shape)):
            buffers += _Group(self, index, group, shape).buffers()
        buffers.sort(key=lambda buffer: buffer.name in CLEARED)
        sends = self.program.sends
        # Messages with the same payloads for several peers are packed once.
        packed = sends.select(sends.peer == first_peers(sends))
        for name, messages in (("send", packed), ("receive", self.program.receives)):
            buffers += _message_buffers(name, self.part, messages, shape)
        return buffers


def _whole_tiles(low: Int64, high: Int64, rows: Int64, multiple: int) -> Int64:
    """Rounds rows [low, high) out to whole kernel tiles, int64[n, 2]. A single tile is widened to
    two, downwards if possible."""
    first, end = low // multiple, -(-high // multiple)
    single = (end - first == 1) & (rows > multiple)
    before = single & (first > 0)
    first, end = first - before, end + (single & ~before)
    return np.stack([first * multiple, np.minimum(end * multiple, rows)], axis=1)


def times_of(program: Program, op: Op) -> Int64:
    """Index of the instruction with this op, by its argument; -1 if there is none."""
    ops, arguments = program.instructions[:, 0], program.instructions[:, 1]
    at = np.flatnonzero(ops == op)
    times = np.full(int(arguments.max(initial=-1)) + 1, -1, np.int64)
    times[arguments[at]] = at
    return times


def result_keys(messages: Messages, num_blocks: int) -> Int64:
    """The `block_keys` of all results among these payloads."""
    at = np.flatnonzero(~IS_INPUT[messages.kind])
    space = OF_KEYS[messages.kind[at]].astype(np.int64)
    return block_keys(space, messages.head_group[at], messages.block[at], num_blocks)


def block_keys(
    space: Int64 | int, group: Int64 | Int32, block: Int64 | Int32, num_blocks: int
) -> Int64:
    """A number that identifies (head group, space, block) and sorts in this order."""
    return (group.astype(np.int64) * len(Space) + space) * num_blocks + block


def padded_rows(rows: int) -> int:
    """Rows of per-head values (log-sum-exps, row sums) in memory, with padding."""
    return -(-rows // PER_HEAD_ROWS) * PER_HEAD_ROWS


@dataclass(frozen=True, eq=False)
class _Group:
    """Lists the buffers of one head group."""

    of: StyledProgram
    index: int
    group: HeadGroup
    shape: AttentionShape

    def buffers(self) -> Iterator[Buffer]:
        yield from self.inputs()
        if self.of.backward:
            yield from self.collected() if self.of.style.collects else self.merged()
        else:
            yield from self.merged() if self.of.style.merges else self.outputs_of_calls()

    def num_rows(self, space: Space) -> int:
        return int(self.of.program.workspace_rows[space, self.index])

    def heads(self, space: Space) -> int:
        repeat = self.shape.q_heads_per_kv_head if space is Space.Q else 1
        return self.group.num_kv_heads * repeat

    def tensor(self, name: str, space: Space, rows: int, item: int, call: int = -1) -> Buffer:
        shape = (rows, self.heads(space), self.shape.head_dim)
        return Buffer(name, self.index, shape, item, call=call)

    def per_head(self, name: str, rows: int, call: int = -1) -> Buffer:
        shape = (self.heads(Space.Q), padded_rows(rows))
        return Buffer(name, self.index, shape, self.shape.accumulator_bytes, rows, call)

    def inputs(self) -> Iterator[Buffer]:
        for space, copied in zip(Space, self.of.copies_inputs(self.index), strict=True):
            for name in INPUTS[self.of.direction][space] if copied else ():
                yield self.tensor(name, space, self.num_rows(space), self.shape.item_bytes)
        if self.of.backward:
            for name in ("lse", "delta"):
                yield self.per_head(name, self.sums_rows(Space.Q))

    def merged(self) -> Iterator[Buffer]:
        """Results that calls add to, and sums in the accumulator dtype if some block needs them."""
        wide, added = self.shape.accumulator_bytes, self.of.contributions
        for space, copied in zip(Space, self.of.copies_results(self.index), strict=True):
            names, rows = OUTPUTS[self.of.direction][space], self.num_rows(space)
            if copied:
                for name in names:
                    yield self.tensor(name, space, rows, self.shape.item_bytes)
                if names == ("out",):
                    yield self.per_head("lse", rows)
            mine = (added.space == space) & (added.head_group == self.index)
            if wide > self.shape.item_bytes and added.wide[mine].any():
                for name in names:
                    yield self.tensor(f"{name}_wide", space, rows, wide)

    def outputs_of_calls(self) -> Iterator[Buffer]:
        if not self.of.copies_results(self.index)[Space.Q]:
            return
        for division, (rows, _) in self.calls:
            count = rows.stop - rows.start
            yield self.tensor("out_call", Space.Q, count, self.shape.item_bytes, division)
            yield self.per_head("lse_call", count, division)

    def collected(self) -> Iterator[Buffer]:
        """Sums of gradients. If every q head has its own kv head, calls write dK and dV to buffers
        of their own instead."""
        grouped = self.shape.q_heads_per_kv_head > 1
        dim = -(-self.shape.head_dim // self.of.style.dim_multiple) * self.of.style.dim_multiple
        yield Buffer("dq_sums", self.index, (self.heads(Space.Q), self.sums_rows(Space.Q), dim), 4)
        for name in ("dk", "dv"):
            if grouped:
                shape = (self.heads(Space.KV), self.sums_rows(Space.KV), dim)
                yield Buffer(f"{name}_sums", self.index, shape, 4)
                continue
            for division, (_, rows) in self.calls:
                count, item = rows.stop - rows.start, self.shape.item_bytes
                yield self.tensor(f"{name}_call", Space.KV, count, item, division)

    def sums_rows(self, space: Space) -> int:
        """Rows of sums, in whole kernel tiles, with room to align every sequence. There are at most
        as many sequences as runs of rows."""
        side, rows = self.of.style.row_multiple, self.num_rows(space)
        most = self.of.style.most_sequences
        if most and not self.of.has_messages and len(self.calls) == 1:
            rows += (min(most, len(self.of.mask.rows)) + 1) * side
        return -(-rows // side) * side

    @cached_property
    def calls(self) -> list[tuple[int, tuple[slice, slice]]]:
        """Division, query rows and key rows of each of the group's calls."""
        rows = self.of.call_rows.items()
        return [(division, hull) for (division, g), hull in rows if g == self.index]


def _message_buffers(
    name: str, part: RankPlan, messages: Messages, shape: AttentionShape
) -> Iterator[Buffer]:
    key = messages.phase.astype(np.int64) * part.num_ranks + messages.peer
    keys, message = np.unique(key, return_inverse=True)
    sizes = np.bincount(message, part.payload_bytes(messages, shape), len(keys)).astype(np.int64)
    padded = -(-sizes // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT
    phases, of_phase = np.unique(keys // part.num_ranks, return_inverse=True)
    for phase, size in zip(phases.tolist(), np.bincount(of_phase, padded), strict=False):
        yield Buffer(name, phase, (int(size),), 1)


def first_peers(messages: Messages) -> Int32:
    """For each payload, the first peer whose message of that phase has the same payloads as the
    message of its peer, int32[payloads]."""
    first = messages.peer.copy()
    key = np.stack([messages.phase, messages.peer])
    starts = np.flatnonzero(np.append(True, (np.diff(key) != 0).any(axis=0))[: len(messages)])
    payloads = np.stack([messages.kind, messages.head_group, messages.block], axis=1)
    known: dict[tuple[int, bytes], int] = {}
    for start, end in pairwise([*starts.tolist(), len(messages)]):
        content = (int(messages.phase[start]), payloads[start:end].tobytes())
        first[start:end] = known.setdefault(content, int(messages.peer[start]))
    return first


GRAPH_BYTES = 125_000  # 121 kB each on one H200: python -m benchmarks.gpu_memory graphs


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes of every rank in one attention call, int64[ranks] per direction.

    Includes copies of inputs with space for received blocks, sums in a wider dtype, row sums,
    partial results and message buffers, but not q, kv, out, log-sum-exps and gradients, which are
    the caller's. With several masks, it is the largest call of each rank. `backward` is 0 in plans
    for evaluation. `graphs` is an upper bound of the driver's memory for the CUDA graphs of a
    prepared plan, if graphs are used: one per communication point.
    """

    forward: Int64
    backward: Int64
    graphs: Int64

    @property
    def per_rank(self) -> Int64:
        """The larger direction of every rank, with its graphs."""
        return np.maximum(self.forward, self.backward) + self.graphs

    @property
    def peak(self) -> int:
        """The most bytes of any rank."""
        return int(self.per_rank.max())


def measure_memory(
    parts: Sequence[RankPlan],
    shape: AttentionShape | None = None,
    style: KernelStyle | None = None,
) -> MemoryUse:
    """Memory of these parts in a call of `shape` (default: the plan's own) with a kernel of `style`
    (default: one that merges)."""
    used = np.zeros((3, len(parts)), np.int64)
    for rank, part in enumerate(parts):
        for mask in part.masks.values():
            for direction, program in mask.programs():
                styled = StyledProgram(part, mask, direction, style)
                size = sum(buffer.num_bytes for buffer in styled.buffers(shape or part.shape))
                used[direction, rank] = max(used[direction, rank], size)
                if styled.style.fixed and styled.has_messages:
                    points = int((program.instructions[:, 0] != Op.COMPUTE).sum())
                    used[2, rank] += GRAPH_BYTES * (points + 1)
    return MemoryUse(*(frozen(column, np.int64) for column in used))
