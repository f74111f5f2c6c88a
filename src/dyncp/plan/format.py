"""The dataclasses of plans. A `RankPlan` holds, in compact arrays, all that one rank needs to run a
batch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from dyncp.arrays import Columns, Int32, Int64, frozen, ranges_of, starts_of
from dyncp.blocks import (
    AttentionShape,
    Direction,
    HeadGroup,
    Tiles,
    TokenBlocks,
    bytes_per_token,
)
from dyncp.checks import MOST_RANKS, whole_number
from dyncp.masks import LinearRanges
from dyncp.placement import Balance


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows are laid out. Slots start on multiples of `slot_alignment` rows (the kernel tile),
    and a rank's local rows are padded to a multiple of `local_multiple`. If that is above 1, a rank
    without tokens gets `local_multiple` padding rows, for models that cannot run on zero rows."""

    slot_alignment: int = 128
    local_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("slot_alignment", "local_multiple"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, MOST_RANKS))


def pad_rows(tokens: Int64, local_multiple: int) -> Int64:
    """The number of local rows of each rank, from its number of tokens."""
    return -(-tokens.clip(int(local_multiple > 1)) // local_multiple) * local_multiple


class Op(IntEnum):
    """The kinds of instructions in a rank's program. Their argument is a phase or a division."""

    LAUNCH = 0  # start the sends and receives of a phase
    WAIT = 1  # wait until all messages of a phase have arrived, and unpack their inputs
    COMPUTE = 2  # compute the tiles of a division


LAUNCH, WAIT, COMPUTE = (int(op) for op in Op)  # compiled code takes no enums


class Space(IntEnum):
    """The two workspaces of a head group: local rows first, then slots for received blocks."""

    Q = 0
    KV = 1


@dataclass(frozen=True, eq=False)
class OwnedBlocks(TokenBlocks):
    """All token blocks of the batch with the ranks that own them."""

    owner: Int32


@dataclass(frozen=True, eq=False)
class Stretches(Columns):
    """Stretches of the batch: tokens that follow each other in one text. `start` is the coordinate
    of a stretch's first token, `before` that of the token before it in the text, or a negative code
    of `masks/positions.py`. Layers with state need them: see `contiguous.py`."""

    start: Int32
    before: Int32


@dataclass(frozen=True, eq=False)
class RowRuns(Columns):
    """The allowed key ranges of query rows, as runs of rows whose ranges grow linearly, ordered by
    block and start. Row `start + i` of a run has the ranges base + i × slope, relative to its
    sequence; no run crosses a block border.

    From row to row, both ends of a mask's ranges mostly stay or move by one, so a few runs are
    enough. Rows 0..3 of a causal mask, [0,1) [0,2) [0,3) [0,4), are one run: base [0,1), slope
    [0,1). A mask without such a structure takes a run per row."""

    block: Int32  # [runs]
    start: Int32  # [runs] index of the first row in its sequence
    base: Int32  # [runs, R, 2]
    slope: Int32  # [runs, R, 2]

    @property
    def num_ranges(self) -> int:
        return int(self.base.shape[1])

    def ends(self, block_end: Int32) -> Int64:
        """First row after each run: the start of the block's next run, or the block's end."""
        ends = block_end[self.block].astype(np.int64)
        not_last = np.flatnonzero(self.block[1:] == self.block[:-1])
        ends[not_last] = self.start[not_last + 1]
        return ends

    def expand(self, block: int, start: int, end: int) -> Int32:
        """Key ranges int32[end - start, R, 2] of all rows of a block that spans [start, end)."""
        own = slice(*np.searchsorted(self.block, [block, block + 1]))
        first = self.start[own]
        counts = np.append(first[1:], end) - first
        assert len(first), f"plan has no key ranges for block {block}"
        step = np.arange(start, end) - np.repeat(first, counts)
        base, slope = (np.repeat(x[own], counts, axis=0) for x in (self.base, self.slope))
        return (base + slope * step[:, None, None]).astype(np.int32)


def build_row_runs(runs: LinearRanges, blocks: TokenBlocks) -> RowRuns:
    """Cuts the runs of all sequences where blocks begin."""
    of_sequence = np.repeat(starts_of(runs.lengths)[:-1], np.diff(runs.first))
    run_row, block_row = of_sequence + runs.start, starts_of(blocks.tokens)
    of_run = np.searchsorted(block_row, run_row, side="right") - 1
    # The first row of a run also continues the run before it, so the last row of a block needs no
    # run of its own.
    inside = (run_row > block_row[of_run]) & (run_row < block_row[of_run + 1] - 1)
    row = np.concatenate([block_row[:-1], run_row[inside]])
    block = np.concatenate([np.arange(len(blocks)), of_run[inside]])
    order = np.argsort(row)
    row, block = row[order], block[order]
    run = np.searchsorted(run_row, row, side="right") - 1
    step, slope = row - run_row[run], runs.slope[run]
    base = runs.base[run] + step[:, None, None].astype(np.int32) * slope
    slope[blocks.tokens[block] == 1] = 0
    start = row - block_row[block] + blocks.start[block]
    return RowRuns(*map(frozen, (block, start, base, slope)))


@dataclass(frozen=True, eq=False)
class Messages(Columns):
    """Payloads that a rank sends (or receives), ordered by phase, peer, kind, head group and block.

    All payloads of one phase and peer are sent as one message. Received results are merged in the
    order of this list."""

    phase: Int32
    peer: Int32
    kind: Int32
    head_group: Int32
    block: Int32


@dataclass(frozen=True, eq=False)
class Slots(Columns):
    """Where received blocks are stored in the workspaces, from row `row` on.

    A slot holds its block from instruction `first` (the WAIT that fills it) to `last`."""

    space: Int32
    head_group: Int32
    block: Int32
    row: Int32
    first: Int32
    last: Int32


@dataclass(frozen=True, eq=False)
class Program:
    """What one rank does for one mask and direction. `tile_division` is the division of each tile,
    `instructions` is int32[n, 2] (Op and argument), `workspace_rows` int32[spaces, head groups]."""

    tile_division: Int32
    instructions: Int32
    sends: Messages
    receives: Messages
    slots: Slots
    workspace_rows: Int32


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """The tiles of one mask that a rank computes, the key ranges of their query rows, and a program
    per direction (`backward` is None in forward-only plans)."""

    tiles: Tiles
    rows: RowRuns
    forward: Program
    backward: Program | None

    def programs(self) -> Iterator[tuple[Direction, Program]]:
        """Every planned direction with its program."""
        yield Direction.FORWARD, self.forward
        if self.backward is not None:
            yield Direction.BACKWARD, self.backward

    def program(self, direction: Direction) -> Program:
        program = self.forward if Direction(direction) is Direction.FORWARD else self.backward
        if program is None:
            raise ValueError(
                "this plan has no backward program, because it was made for evaluation; plan with "
                "forward_only=False to train"
            )
        return program


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The part of a plan that one rank receives. `digest` is the digest of the whole plan."""

    rank: int
    num_ranks: int
    fingerprint: str
    digest: str
    solver: str
    static: bool
    balance: Balance
    shape: AttentionShape
    head_groups: tuple[HeadGroup, ...]
    slot_alignment: int
    local_multiple: int
    declared_bytes: Mapping[str, tuple[int, int]]
    lengths: Int32
    blocks: OwnedBlocks
    stretches: Stretches
    masks: Mapping[str, MaskPlan]

    @property
    def filler(self) -> bool:
        """Whether the batch is a placeholder without targets, for a step that has no batch left."""
        return False

    @cached_property
    def local_blocks(self) -> Int64:
        """Indices of the blocks that this rank owns, in the order of its rows."""
        return np.flatnonzero(self.blocks.owner == self.rank)

    @cached_property
    def tokens_per_rank(self) -> Int64:
        held = np.bincount(self.blocks.owner, self.blocks.tokens, self.num_ranks)
        return held.astype(np.int64)

    @cached_property
    def rows_per_rank(self) -> Int64:
        """Local rows of each rank: its tokens with padding (see `Layout`)."""
        return pad_rows(self.tokens_per_rank, self.local_multiple)

    @property
    def local_tokens(self) -> int:
        return int(self.tokens_per_rank[self.rank])

    @cached_property
    def local_rows(self) -> int:
        """Local tokens with padding (see `Layout`)."""
        return int(self.rows_per_rank[self.rank])

    @cached_property
    def block_row(self) -> Int64:
        """First local row of each block that this rank owns; -1 for other blocks."""
        row = np.full(len(self.blocks), -1, np.int64)
        row[self.local_blocks] = starts_of(self.blocks.tokens[self.local_blocks])[:-1]
        return row

    @cached_property
    def block_coordinate(self) -> Int64:
        """Coordinate of each block's first token."""
        return starts_of(self.lengths)[self.blocks.sequence] + self.blocks.start

    @cached_property
    def local_coordinates(self) -> Int64:
        """Coordinate of every local token, in the order of the rows."""
        own = self.local_blocks
        return ranges_of(self.block_coordinate[own], self.blocks.tokens[own])

    @cached_property
    def row_coordinates(self) -> Int64:
        """Coordinate of every local row; -1 for padding rows."""
        padding = np.full(self.local_rows - self.local_tokens, -1)
        return np.append(self.local_coordinates, padding).astype(np.int64)

    def mask_plan(self, name: str) -> MaskPlan:
        if not isinstance(name, str) or name not in self.masks:
            raise ValueError(f"mask {name!r} is not in this plan; it has {', '.join(self.masks)}")
        return self.masks[name]

    def sent_bytes(self, name: str, direction: Direction, shape: AttentionShape) -> int:
        """Bytes that this rank sends in one attention call of `shape`."""
        return int(self.payload_bytes(self.mask_plan(name).program(direction).sends, shape).sum())

    def payload_bytes(self, messages: Messages, shape: AttentionShape) -> Int64:
        """Bytes of each of these payloads in a call of `shape`."""
        per_token = bytes_per_token(shape, self.groups_for(shape))
        size: Int64 = per_token[messages.kind, messages.head_group]
        return size * self.blocks.tokens[messages.block]

    def groups_for(self, shape: AttentionShape) -> tuple[HeadGroup, ...]:
        """Head groups if the plan runs with `shape`. A plan without exact head counts has one
        group, which holds all heads of `shape`."""
        return self.head_groups if self.shape.exact else shape.head_groups(1)


@dataclass(frozen=True, eq=False)
class AgreedPlan(RankPlan):
    """A part that the global ranks `agreed_by` have compared: an executor over these ranks does not
    compare it again. A `filler` is a placeholder with a sample of another replica, if the last
    round has no batch left for this one."""

    agreed_by: tuple[int, ...] = ()
    filler: bool = False
