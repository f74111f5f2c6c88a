"""Buffers: the tensors and message buffers that one attention call takes on a rank.

What the caller passes in and gets back (q, k, v, out, their gradients) is read and written in place
where nothing is received and no graph needs fixed addresses. Elsewhere it is copied, and received
blocks follow it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from dyncp.arrays import Int32, Int64, frozen
from dyncp.blocks import IS_INPUT, OF_KEYS, AttentionShape, Direction, HeadGroup, bytes_per_token
from dyncp.plan.format import MaskPlan, Messages, Op, Program, RankPlan, Space
from dyncp.plan.workspace import (
    Contributions,
    KernelStyle,
    call_rows,
    find_contributions,
    places_of,
)

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


def padded_rows(rows: int) -> int:
    """Rows that per-head values (log-sum-exps, row sums) take in memory."""
    return -(-rows // PER_HEAD_ROWS) * PER_HEAD_ROWS


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
        size = self.item_bytes
        for extent in self.shape:
            size *= extent
        return -(-size // ALIGNMENT) * ALIGNMENT


def list_buffers(
    part: RankPlan,
    mask: MaskPlan,
    direction: Direction,
    shape: AttentionShape,
    style: KernelStyle,
    contributions: Contributions | None = None,
) -> list[Buffer]:
    """All buffers of one call, those that are cleared at its start one after the other."""
    program = mask.program(direction)
    if contributions is None:
        contributions = find_contributions(part, mask, program)
    buffers: list[Buffer] = []
    groups = part.groups_for(shape)
    for index, group in enumerate(groups):
        of_group = _Group(index, group, shape, direction, style, part, mask, contributions)
        buffers += of_group.buffers()
    buffers.sort(key=lambda buffer: buffer.name in CLEARED)
    for name, messages in (("send", program.sends), ("receive", program.receives)):
        buffers += _message_buffers(name, part, messages, bytes_per_token(shape, groups))
    return buffers


@dataclass(frozen=True, eq=False)
class Staging:
    """Whether inputs and results of a head group, by workspace, lie in the executor's buffers or in
    the caller's tensors. A kernel that merges writes results in place where none are received;
    one that does not, where it makes a single call."""

    inputs: tuple[bool, bool]
    results: tuple[bool, bool]

    @staticmethod
    def of(
        part: RankPlan, mask: MaskPlan, program: Program, group: int, style: KernelStyle
    ) -> "Staging":
        fixed = style.fixed and has_messages(program)
        slots = [int(rows) > part.local_rows for rows in program.workspace_rows[:, group]]
        inputs = [fixed or some for some in slots]
        received = program.receives
        of_group = ~IS_INPUT[received.kind] & (received.head_group == group)
        results = [
            copied or bool((of_group & (OF_KEYS[received.kind] == space)).any())
            for space, copied in enumerate(inputs)
        ]
        backward = program is mask.backward
        if backward and style.collects:
            results = [True, True]
        elif not backward and not style.merges:
            calls = np.unique(program.tile_division[mask.tiles.head_group == group])
            results[Space.Q] |= len(calls) > 1
        return Staging((inputs[0], inputs[1]), (results[0], results[1]))


def has_messages(program: Program) -> bool:
    return len(program.sends) + len(program.receives) > 0


@dataclass(frozen=True, eq=False)
class _Group:
    index: int
    group: HeadGroup
    shape: AttentionShape
    direction: Direction
    style: KernelStyle
    part: RankPlan
    mask: MaskPlan
    contributions: Contributions

    @cached_property
    def program(self) -> Program:
        return self.mask.program(self.direction)

    @cached_property
    def staging(self) -> Staging:
        return Staging.of(self.part, self.mask, self.program, self.index, self.style)

    def buffers(self) -> Iterator[Buffer]:
        yield from self.inputs()
        if self.direction is Direction.FORWARD:
            yield from self.merged() if self.style.merges else self.outputs_of_calls()
        else:
            yield from self.collected() if self.style.collects else self.merged()

    def num_rows(self, space: Space) -> int:
        return int(self.program.workspace_rows[space, self.index])

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
        for space in Space:
            if self.staging.inputs[space]:
                for name in INPUTS[self.direction][space]:
                    yield self.tensor(name, space, self.num_rows(space), self.shape.item_bytes)
        if self.direction is Direction.BACKWARD:
            for name in ("lse", "delta"):
                yield self.per_head(name, self.sums_rows(Space.Q))

    def merged(self) -> Iterator[Buffer]:
        """Sums that calls add to, and those in another dtype where some row needs them."""
        wide = self.shape.accumulator_bytes
        for space in Space:
            names, rows = OUTPUTS[self.direction][space], self.num_rows(space)
            if self.staging.results[space]:
                for name in names:
                    yield self.tensor(name, space, rows, self.shape.item_bytes)
                if names == ("out",):
                    yield self.per_head("lse", rows)
            added = self.contributions
            mine = (added.space == space) & (added.head_group == self.index)
            if wide > self.shape.item_bytes and added.wide[mine].any():
                for name in names:
                    yield self.tensor(f"{name}_wide", space, rows, wide)

    def outputs_of_calls(self) -> Iterator[Buffer]:
        if not self.staging.results[Space.Q]:
            return
        for division, (rows, _) in self.calls():
            count = rows.stop - rows.start
            yield self.tensor("out_call", Space.Q, count, self.shape.item_bytes, division)
            yield self.per_head("lse_call", count, division)

    def collected(self) -> Iterator[Buffer]:
        """Where heads are not grouped, kernels write dK and dV of every call instead."""
        grouped = self.shape.q_heads_per_kv_head > 1
        dim = -(-self.shape.head_dim // self.style.dim_multiple) * self.style.dim_multiple
        yield Buffer("dq_sums", self.index, (self.heads(Space.Q), self.sums_rows(Space.Q), dim), 4)
        for name in ("dk", "dv"):
            if grouped:
                shape = (self.heads(Space.KV), self.sums_rows(Space.KV), dim)
                yield Buffer(f"{name}_sums", self.index, shape, 4)
                continue
            for division, (_, rows) in self.calls():
                count, item = rows.stop - rows.start, self.shape.item_bytes
                yield self.tensor(f"{name}_call", Space.KV, count, item, division)

    def sums_rows(self, space: Space) -> int:
        """Whole kernel tiles. A sequence of the mask has a run of rows, or several."""
        side, rows = self.style.row_multiple, self.num_rows(space)
        most = self.style.most_sequences
        if most and not has_messages(self.program) and len(self.calls()) == 1:
            rows += (min(most, len(self.mask.rows)) + 1) * side
        return -(-rows // side) * side

    def calls(self) -> list[tuple[int, tuple[slice, slice]]]:
        """Divisions of the group's calls, with the rows that they touch."""
        place = places_of(self.part, self.program)
        rows = call_rows(self.part, self.mask, self.program, place, self.style.row_multiple)
        return [(division, hull) for (division, g), hull in rows.items() if g == self.index]


def _message_buffers(
    name: str, part: RankPlan, messages: Messages, bytes_per_row: Int64
) -> Iterator[Buffer]:
    if name == "send":  # messages with the same payloads are packed once
        messages = messages.select(messages.peer == first_peers(messages))
    num_bytes = bytes_per_row[messages.kind, messages.head_group]
    num_bytes = num_bytes * part.blocks.tokens[messages.block]
    key = messages.phase.astype(np.int64) * part.num_ranks + messages.peer
    keys, message = np.unique(key, return_inverse=True)
    sizes = np.bincount(message, num_bytes, len(keys)).astype(np.int64)
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

    Copies of inputs that get buffer for received blocks, sums in a wider dtype, row sums, partial
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
    style = KernelStyle() if style is None else style
    both = [
        [_rank_bytes(part, direction, shape or part.shape, style) for part in parts]
        for direction in Direction
    ]
    graphs = [_graph_bytes(part, style) for part in parts]
    return MemoryUse(*(frozen(column, np.int64) for column in (*both, graphs)))


def _graph_bytes(part: RankPlan, style: KernelStyle) -> int:
    if not style.fixed:
        return 0
    programs = [
        program
        for mask in part.masks.values()
        for program in (mask.forward, mask.backward)
        if program is not None and has_messages(program)
    ]
    points = [int((program.instructions[:, 0] != Op.COMPUTE).sum()) for program in programs]
    return GRAPH_BYTES * (sum(points) + len(points))


def _rank_bytes(
    part: RankPlan, direction: Direction, shape: AttentionShape, style: KernelStyle
) -> int:
    needed = [
        sum(buffer.num_bytes for buffer in list_buffers(part, mask, direction, shape, style))
        for mask in part.masks.values()
        if direction is Direction.FORWARD or mask.backward is not None
    ]
    return max(needed, default=0)
