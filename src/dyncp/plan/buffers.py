"""Workspaces and buffers: where blocks lie, which rows kernel calls touch and what they add to each
block, and the tensors and message buffers that one attention call takes on a rank.

A call contributes to the rows of every block that it touches. Results received for the same rows
are added after the last call, when the sum leaves the rank or the call ends. A single contribution
needs no adding up.

What the caller passes in and gets back (q, k, v, out, their gradients) is read and written in place
where nothing is received and no graph needs fixed addresses. Elsewhere it is copied, and received
blocks follow it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from dyncp.arrays import Bool, Int32, Int64, frozen
from dyncp.blocks import IS_INPUT, OF_KEYS, AttentionShape, Direction, HeadGroup
from dyncp.plan.format import MaskPlan, Messages, Op, Program, RankPlan, Space

PER_HEAD_ROWS = 128  # per-head values are padded to whole kernel tiles, which GPUs load at once
ALIGNMENT = 256  # bytes: every buffer starts on a boundary that suits GPU memory transactions
MESSAGE_ALIGNMENT = 16  # bytes: the message of every peer starts where vector loads may
INPUTS: dict[Direction, dict[Space, tuple[str, ...]]] = {
    Direction.FORWARD: {Space.Q: ("q",), Space.KV: ("k", "v")},
    Direction.BACKWARD: {Space.Q: ("q", "dout"), Space.KV: ("k", "v")},
}
OUTPUTS: dict[Direction, dict[Space, tuple[str, ...]]] = {
    Direction.FORWARD: {Space.Q: ("out",), Space.KV: ()},
    Direction.BACKWARD: {Space.Q: ("dq",), Space.KV: ("dk", "dv")},
}
SUMS = ("dq_sums", "dk_sums", "dv_sums")
# Zeroed at the start of a call, all together: sums, and per-head values of padding rows.
CLEARED = (*SUMS, "lse", "delta")


@dataclass(frozen=True, slots=True)
class KernelStyle:
    """What the memory of a call depends on, in a kernel and in how it is run.

    `merges`: forward calls add up what they compute; otherwise each leaves an output of its own,
    for all rows of the kernel tiles that it touches.
    `collects`: gradients collect in fp32 sums of the kernel's own order, over all calls of a
    program, with rows padded to `row_multiple` and head dims to `dim_multiple`. The only call of a
    rank without messages may be up to `most_sequences` whole sequences, each of which begins on
    such a border.
    `fixed`: where there are messages, inputs are copied to and results from the executor's own
    memory, so that everything between can be replayed as graphs.
    """

    merges: bool = True
    collects: bool = False
    fixed: bool = False
    row_multiple: int = 1
    dim_multiple: int = 1
    most_sequences: int = 0


@dataclass(frozen=True, eq=False)
class Contributions:
    """Ordered by head group, space, block and `time`, the index of the call's instruction. `wide`
    says whether the sum is left in the accumulator dtype: it is rounded to the final one when the
    last contribution is added."""

    time: Int64
    space: Int64
    head_group: Int64
    block: Int64
    first: Bool
    wide: Bool

    def __len__(self) -> int:
        return len(self.time)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor of head group `index`, or the messages of phase `index`. `call` is the division
    whose results it is for, if it is for those of one call."""

    name: str
    index: int
    shape: tuple[int, ...]  # as it lies in memory: per-head values have heads first
    item_bytes: int
    rows: int = 0  # of per-head values, whose rows are padded
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
        """First row of every block in each workspace, [spaces, head groups, blocks]; -1: absent."""
        place = np.tile(self.part.block_row, (len(Space), len(self.part.head_groups), 1))
        slots = self.program.slots
        place[slots.space, slots.head_group, slots.block] = slots.row
        return place

    @cached_property
    def call_rows(self) -> dict[tuple[int, int], tuple[slice, slice]]:
        """Query rows and key rows of every kernel call, by division and head group: from the first
        of the style's kernel tiles that it touches to the last, at least two where there are two.
        """
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
        """One contribution of every call to every block that it touches."""
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
        goes_on = result_keys(program.receives, num_blocks)
        if shape.partial_dtype not in (None, shape.dtype):  # sent from the wide sums
            goes_on = np.concatenate([goes_on, result_keys(program.sends, num_blocks)])
        wide = ~changes[1:] | np.isin(key, goes_on)
        return Contributions(time, space, group, block, changes[:-1], wide)

    def copies_inputs(self, group: int) -> list[bool]:
        """Whether a head group's inputs, by workspace, lie in the executor's buffers or in the
        caller's tensors."""
        fixed, rows = self.style.fixed and self.has_messages, self.part.local_rows
        return [fixed or int(n) > rows for n in self.program.workspace_rows[:, group]]

    def copies_results(self, group: int) -> list[bool]:
        """The same of its results. A kernel that merges writes them in place where none are
        received; one that does not, where it makes a single call."""
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
        """All buffers of one call, those that are cleared at its start one after the other."""
        buffers: list[Buffer] = []
        for index, group in enumerate(self.part.groups_for(shape)):
            buffers += _Group(self, index, group, shape).buffers()
        buffers.sort(key=lambda buffer: buffer.name in CLEARED)
        sends = self.program.sends
        # Messages with the same payloads are packed once.
        packed = sends.select(sends.peer == first_peers(sends))
        for name, messages in (("send", packed), ("receive", self.program.receives)):
            buffers += _message_buffers(name, self.part, messages, shape)
        return buffers


def _whole_tiles(low: Int64, high: Int64, rows: Int64, multiple: int) -> Int64:
    """[first, end) of each hull. A single tile gets a neighbour, the one before it if there is."""
    first, end = low // multiple, -(-high // multiple)
    single = (end - first == 1) & (rows > multiple)
    before = single & (first > 0)
    first, end = first - before, end + (single & ~before)
    return np.stack([first * multiple, np.minimum(end * multiple, rows)], axis=1)


def times_of(program: Program, op: Op) -> Int64:
    """Index of each instruction of a kind by its argument; -1 where there is none."""
    ops, arguments = program.instructions[:, 0], program.instructions[:, 1]
    at = np.flatnonzero(ops == op)
    times = np.full(int(arguments.max(initial=-1)) + 1, -1, np.int64)
    times[arguments[at]] = at
    return times


def result_keys(messages: Messages, num_blocks: int) -> Int64:
    """`block_keys` of the results among these payloads."""
    at = np.flatnonzero(~IS_INPUT[messages.kind])
    space = OF_KEYS[messages.kind[at]].astype(np.int64)
    return block_keys(space, messages.head_group[at], messages.block[at], num_blocks)


def block_keys(
    space: Int64 | int, group: Int64 | Int32, block: Int64 | Int32, num_blocks: int
) -> Int64:
    """One number for a block of a head group in a workspace."""
    return (group.astype(np.int64) * len(Space) + space) * num_blocks + block


def padded_rows(rows: int) -> int:
    """Rows that per-head values (log-sum-exps, row sums) take in memory."""
    return -(-rows // PER_HEAD_ROWS) * PER_HEAD_ROWS


@dataclass(frozen=True, eq=False)
class _Group:
    """The buffers of one head group."""

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
        """Sums that calls add to, and those in another dtype where some row needs them."""
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
        for division, (rows, _) in (
            self.calls if self.of.copies_results(self.index)[Space.Q] else ()
        ):
            count = rows.stop - rows.start
            yield self.tensor("out_call", Space.Q, count, self.shape.item_bytes, division)
            yield self.per_head("lse_call", count, division)

    def collected(self) -> Iterator[Buffer]:
        """Where heads are not grouped, kernels write dK and dV of every call instead."""
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
        """Whole kernel tiles. A sequence of the mask has a run of rows, or several."""
        side, rows = self.of.style.row_multiple, self.num_rows(space)
        most = self.of.style.most_sequences
        if most and not self.of.has_messages and len(self.calls) == 1:
            rows += (min(most, len(self.of.mask.rows)) + 1) * side
        return -(-rows // side) * side

    @cached_property
    def calls(self) -> list[tuple[int, tuple[slice, slice]]]:
        """Divisions of the group's calls, with the rows that they touch."""
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
    """The first peer that gets the same payloads in the same phase, int32[payloads]."""
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

    Copies of inputs that received blocks follow, sums in a wider dtype, row sums, partial
    results and message buffers count; q, kv, out, log-sum-exps and gradients, which the caller
    gives and gets, do not. With several masks, each rank's largest call counts. `backward` is 0 in
    plans for evaluation. `graphs` is what the driver takes, at most, for the CUDA graphs of a
    prepared plan while it is alive, where they are used: one for every communication point.
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
        """Most bytes on any rank in either direction."""
        return int(self.per_rank.max())


def measure_memory(
    parts: Sequence[RankPlan],
    shape: AttentionShape | None = None,
    style: KernelStyle | None = None,
) -> MemoryUse:
    """Of these ranks' parts in a call of `shape` (default: the plan's own) with a kernel of `style`
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
