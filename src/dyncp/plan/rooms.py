"""Rooms: the tensors and message buffers that one attention call takes on a rank.

What the caller gives and gets (q, k, v, out, their gradients) is read and written in place where
nothing is received and no graph wants fixed addresses. Elsewhere it is copied, followed by the
received blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.blocks import AttentionShape, Direction, HeadGroup, bytes_per_token
from dyncp.plan.contributions import (
    RESULTS,
    SPACE_OF_RESULT,
    Contributions,
    KernelStyle,
    find_contributions,
)
from dyncp.plan.places import call_rows, places_of
from dyncp.plan.rank_plan import MaskPlan, Messages, Program, RankPlan, Space

PER_HEAD_ROWS = 128  # per-head values are padded to whole kernel tiles, which GPUs load at once
ALIGNMENT = 256  # bytes: every room starts on a border that GPU memory transactions like
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
# Set to 0 at the start of a call, all together: sums, and per-head values of rows that nobody has.
CLEARED = (*SUMS, "lse", "delta")


def padded_rows(rows: int) -> int:
    """Rows that per-head values (log-sum-exps, row sums) take in memory."""
    return -(-rows // PER_HEAD_ROWS) * PER_HEAD_ROWS


@dataclass(frozen=True, slots=True)
class Room:
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


def list_rooms(
    part: RankPlan,
    mask: MaskPlan,
    direction: Direction,
    shape: AttentionShape,
    style: KernelStyle,
    found: Contributions | None = None,
) -> list[Room]:
    """All rooms of one call, those that are cleared at its start one after the other."""
    program = mask.program(direction)
    found = find_contributions(part, mask, program) if found is None else found
    rooms: list[Room] = []
    groups = part.groups_for(shape)
    for index, group in enumerate(groups):
        rooms += _Group(index, group, shape, direction, style, part, mask, found).rooms()
    rooms.sort(key=lambda room: room.name in CLEARED)
    for name, messages in (("send", program.sends), ("receive", program.receives)):
        rooms += _message_rooms(name, part, messages, bytes_per_token(shape, groups))
    return rooms


@dataclass(frozen=True, eq=False)
class Residence:
    """What of a head group lies in the executor's own memory; the rest is the caller's.

    `inputs` and `results` are by workspace. A kernel that merges has results in place where no
    results are received; one that does not, where it makes a single call."""

    inputs: tuple[bool, bool]
    results: tuple[bool, bool]

    @staticmethod
    def of(
        part: RankPlan, mask: MaskPlan, program: Program, group: int, style: KernelStyle
    ) -> "Residence":
        fixed = style.fixed and has_messages(program)
        slots = [int(rows) > part.local_rows for rows in program.workspace_rows[:, group]]
        inputs = [fixed or some for some in slots]
        received = program.receives
        of_group = RESULTS[received.kind] & (received.head_group == group)
        results = [
            copied or bool((of_group & (SPACE_OF_RESULT[received.kind] == space)).any())
            for space, copied in enumerate(inputs)
        ]
        backward = program is mask.backward
        if backward and style.collects:
            results = [True, True]
        elif not backward and not style.merges:
            calls = np.unique(program.tile_division[mask.tiles.head_group == group])
            results[Space.Q] |= len(calls) > 1
        return Residence((inputs[0], inputs[1]), (results[0], results[1]))


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
    found: Contributions

    @cached_property
    def program(self) -> Program:
        return self.mask.program(self.direction)

    @cached_property
    def residence(self) -> Residence:
        return Residence.of(self.part, self.mask, self.program, self.index, self.style)

    def rooms(self) -> Iterator[Room]:
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

    def tensor(self, name: str, space: Space, rows: int, item: int, call: int = -1) -> Room:
        shape = (rows, self.heads(space), self.shape.head_dim)
        return Room(name, self.index, shape, item, call=call)

    def per_head(self, name: str, rows: int, call: int = -1) -> Room:
        shape = (self.heads(Space.Q), padded_rows(rows))
        return Room(name, self.index, shape, self.shape.accumulator_bytes, rows, call)

    def inputs(self) -> Iterator[Room]:
        for space in Space:
            if self.residence.inputs[space]:
                for name in INPUTS[self.direction][space]:
                    yield self.tensor(name, space, self.num_rows(space), self.shape.item_bytes)
        if self.direction is Direction.BACKWARD:
            for name in ("lse", "delta"):
                yield self.per_head(name, self.sums_rows(Space.Q))

    def merged(self) -> Iterator[Room]:
        """Sums that calls add to, and those in another dtype where some row needs them."""
        wide = self.shape.accumulator_bytes
        for space in Space:
            names, rows = OUTPUTS[self.direction][space], self.num_rows(space)
            if self.residence.results[space]:
                for name in names:
                    yield self.tensor(name, space, rows, self.shape.item_bytes)
                if names == ("out",):
                    yield self.per_head("lse", rows)
            mine = (self.found.space == space) & (self.found.head_group == self.index)
            if wide > self.shape.item_bytes and self.found.wide[mine].any():
                for name in names:
                    yield self.tensor(f"{name}_wide", space, rows, wide)

    def outputs_of_calls(self) -> Iterator[Room]:
        if not self.residence.results[Space.Q]:
            return
        for division, (rows, _) in self.calls():
            count = rows.stop - rows.start
            yield self.tensor("out_call", Space.Q, count, self.shape.item_bytes, division)
            yield self.per_head("lse_call", count, division)

    def collected(self) -> Iterator[Room]:
        """Where heads are not grouped, kernels write dK and dV of every call instead."""
        grouped = self.shape.q_heads_per_kv_head > 1
        dim = -(-self.shape.head_dim // self.style.dim_multiple) * self.style.dim_multiple
        yield Room("dq_sums", self.index, (self.heads(Space.Q), self.sums_rows(Space.Q), dim), 4)
        for name in ("dk", "dv"):
            if grouped:
                shape = (self.heads(Space.KV), self.sums_rows(Space.KV), dim)
                yield Room(f"{name}_sums", self.index, shape, 4)
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


def _message_rooms(
    name: str, part: RankPlan, messages: Messages, bytes_per_row: Int64
) -> Iterator[Room]:
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
        yield Room(name, phase, (int(size),), 1)


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
