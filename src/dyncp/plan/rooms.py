"""Rooms: the tensors and message buffers that one attention call takes on a rank.

What the caller gives and gets (q, k, v, out, their gradients) is read and written in place where a
workspace has no slots. Where it has some, it is copied behind one another with the received blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int64, starts_of
from dyncp.blocks import AttentionShape, Direction, HeadGroup, bytes_per_token
from dyncp.plan.contributions import Contributions, KernelStyle, find_contributions
from dyncp.plan.rank_plan import MaskPlan, Messages, RankPlan, Space

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


def padded_rows(rows: int) -> int:
    """Rows that per-head values (log-sum-exps, row sums) take in memory."""
    return -(-rows // PER_HEAD_ROWS) * PER_HEAD_ROWS


@dataclass(frozen=True, slots=True)
class Room:
    """A tensor of head group `index`, or the messages of phase `index`."""

    name: str
    index: int
    shape: tuple[int, ...]  # as it lies in memory: per-head values have heads first
    item_bytes: int
    rows: int = 0  # of per-head values, whose rows are padded

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
    """All rooms of one call; accumulators of the kernel's own are among them, named "own"."""
    program = mask.program(direction)
    found = find_contributions(part, mask, program, style) if found is None else found
    groups = part.groups_for(shape)
    rooms = []
    for g, group in enumerate(groups):
        rows = tuple(program.workspace_rows[:, g].tolist())
        mine = found.select(found.head_group == g)
        of_group = _Group(g, group, shape, direction, part.local_rows, rows)
        rooms += [
            *of_group.workspaces(),
            *of_group.sums(mine),
            *of_group.partials(part, mine, style),
        ]
        if style.settles and direction is Direction.BACKWARD:
            rooms += of_group.own(style)
    for name, messages in (("send", program.sends), ("receive", program.receives)):
        rooms += _message_rooms(name, part, messages, bytes_per_token(shape, groups))
    return rooms


@dataclass(frozen=True, slots=True)
class _Group:
    index: int
    group: HeadGroup
    shape: AttentionShape
    direction: Direction
    local_rows: int
    rows: tuple[int, ...]  # per space

    def heads(self, space: Space) -> int:
        repeat = self.shape.q_heads_per_kv_head if space is Space.Q else 1
        return self.group.num_kv_heads * repeat

    def tensor(self, name: str, space: Space, rows: int, item: int) -> Room:
        return Room(name, self.index, (rows, self.heads(space), self.shape.head_dim), item)

    def per_head(self, name: str, rows: int) -> Room:
        shape = (self.heads(Space.Q), padded_rows(rows))
        return Room(name, self.index, shape, self.shape.accumulator_bytes, rows)

    def workspaces(self) -> Iterator[Room]:
        """Copies that get room for slots. Row sums of dO·O are made here in any case."""
        for space in Space:
            rows = self.rows[space]
            if rows > self.local_rows:
                names = INPUTS[self.direction][space] + OUTPUTS[self.direction][space]
                for name in names:
                    yield self.tensor(name, space, rows, self.shape.item_bytes)
                if space is Space.Q:
                    yield self.per_head("lse", rows)
        if self.direction is Direction.BACKWARD:
            yield self.per_head("delta", self.rows[Space.Q])

    def sums(self, found: Contributions) -> Iterator[Room]:
        """Accumulators, where some row is added up in another dtype than the final one."""
        if self.shape.accumulator_bytes == self.shape.item_bytes:
            return
        for space in Space:
            if found.wide[found.space == space].any():
                for name in OUTPUTS[self.direction][space]:
                    wide = self.shape.accumulator_bytes
                    yield self.tensor(f"{name}_wide", space, self.rows[space], wide)

    def partials(self, part: RankPlan, found: Contributions, style: KernelStyle) -> Iterator[Room]:
        """Results of one call, or of settling, before they are merged."""
        merged = found.select((found.received < 0) & (~found.first | found.wide))
        if self.direction is Direction.FORWARD:
            if style.rounds_partials and (len(np.unique(found.time)) > 1 or found.wide.any()):
                yield self.tensor("out_partial", Space.Q, self.rows[Space.Q], self.shape.item_bytes)
                yield self.per_head("lse_partial", self.rows[Space.Q])
        elif style.settles:
            for space in Space:
                rows = self._settled_rows(part, merged.block[merged.space == space])
                for name in OUTPUTS[self.direction][space] if rows else ():
                    yield self.tensor(f"{name}_partial", space, rows, self.shape.item_bytes)

    def _settled_rows(self, part: RankPlan, blocks: Int64) -> int:
        """Own rows settle together, slots one by one."""
        own = part.blocks.owner[blocks] == part.rank
        slots = part.blocks.tokens[blocks[~own]].max(initial=0)
        return max(self.local_rows if own.any() else 0, int(slots))

    def own(self, style: KernelStyle) -> Iterator[Room]:
        """Sums of the gradients, and per-head values as the kernel takes them. Where heads are not
        grouped, dK and dV of a call are written before they are added."""
        dim = -(-self.shape.head_dim // style.dim_multiple) * style.dim_multiple
        for space in Space:
            padded = -(-self.rows[space] // style.row_multiple) * style.row_multiple
            for _ in OUTPUTS[Direction.BACKWARD][space]:
                if space is Space.KV and self.shape.q_heads_per_kv_head == 1:
                    yield self.tensor("own", space, padded, 4)
                    yield self.tensor("own", space, padded, self.shape.item_bytes)
                else:
                    yield Room("own", self.index, (padded, self.heads(space), dim), 4)
        for _ in ("lse", "delta"):
            yield self.per_head("own", self.rows[Space.Q])


def _message_rooms(
    name: str, part: RankPlan, messages: Messages, bytes_per_row: Int64
) -> Iterator[Room]:
    for phase, (_, sizes) in message_sizes(part, messages, bytes_per_row).items():
        padded = -(-sizes // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT
        yield Room(name, phase, (int(padded.sum()),), 1)


def message_sizes(
    part: RankPlan, messages: Messages, bytes_per_row: Int64
) -> dict[int, tuple[Int64, Int64]]:
    """Peers and the bytes of their messages, by phase."""
    num_bytes = bytes_per_row[messages.kind, messages.head_group]
    num_bytes = num_bytes * part.blocks.tokens[messages.block]
    key = messages.phase.astype(np.int64) * part.num_ranks + messages.peer
    keys, message = np.unique(key, return_inverse=True)
    sizes = np.bincount(message, num_bytes, len(keys)).astype(np.int64)
    phases, counts = np.unique(keys // part.num_ranks, return_counts=True)
    bounds = starts_of(counts)
    return {
        phase: (keys[first:end] % part.num_ranks, sizes[first:end])
        for phase, first, end in zip(
            phases.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
        )
    }
