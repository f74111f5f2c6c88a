"""The format of plans: RankPlan has all that one rank needs to run a batch, as compact arrays."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np

from dyncp.arrays import Bool, Int32, Int64, frozen, ranges_of, starts_of
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
    """How rows are laid out: slots start on multiples of `slot_alignment` (the kernel-tile border),
    a rank's local rows are padded to `local_multiple`. If that is above 1, a rank without tokens
    gets as many padding rows, for models that cannot run on zero rows."""

    slot_alignment: int = 128
    local_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("slot_alignment", "local_multiple"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, MOST_RANKS))


def pad_rows(tokens: Int64, local_multiple: int) -> Int64:
    """Rows of ranks with these numbers of tokens."""
    return -(-tokens.clip(int(local_multiple > 1)) // local_multiple) * local_multiple


class Op(IntEnum):
    """One instruction of a rank's program, with its argument."""

    LAUNCH = 0  # start the sends and receives of a phase
    WAIT = 1  # until everything this rank receives in a phase has arrived; unpack inputs
    COMPUTE = 2  # the tiles of a division


LAUNCH, WAIT, COMPUTE = (int(op) for op in Op)  # compiled code takes no enums


class Space(IntEnum):
    """The two workspaces of a head group: own rows first, then slots for received blocks."""

    Q = 0
    KV = 1


@dataclass(frozen=True, eq=False)
class OwnedBlocks(TokenBlocks):
    """All token blocks of the batch with their owners, int32[blocks] each."""

    owner: Int32


@dataclass(frozen=True, eq=False)
class Stretches:
    """Tokens of the batch that follow each other in one text, by the coordinate of the first one;
    `before` is that of the token before it, or what `masks/positions.py` says instead. Layers with
    state need them: see `contiguous.py`."""

    start: Int32
    before: Int32

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, eq=False)
class RowRuns:
    """The allowed key ranges of query rows, stored as runs that grow linearly, ordered by block and
    start. Row `start + i` of a run has the ranges base + i × slope (sequence-relative); no run
    crosses a block border.

    Along a sequence, both ends of a mask's ranges mostly stay or move by one from row to row, so a
    few runs say it all. Rows 0..3 of a causal mask, [0,1) [0,2) [0,3) [0,4), are one run: base
    [0,1), slope [0,1). A mask without any such structure takes a run per row."""

    block: Int32  # [runs]
    start: Int32  # [runs] first row, in its sequence
    base: Int32  # [runs, R, 2]
    slope: Int32  # [runs, R, 2]

    def __len__(self) -> int:
        return len(self.block)

    @property
    def num_ranges(self) -> int:
        return int(self.base.shape[1])

    def ends(self, block_end: Int32) -> Int64:
        """First row after each run: where the next one of its block starts, or the block's end."""
        ends = block_end[self.block].astype(np.int64)
        goes_on = np.flatnonzero(self.block[1:] == self.block[:-1])
        ends[goes_on] = self.start[goes_on + 1]
        return ends

    def expand(self, block: int, start: int, end: int) -> Int32:
        """Ranges int32[end - start, R, 2] of the rows of one block, which spans [start, end)."""
        own = slice(*np.searchsorted(self.block, [block, block + 1]))
        first = self.start[own]
        counts = np.append(first[1:], end) - first
        assert len(first), f"plan has no key ranges for block {block}"
        step = np.arange(start, end) - np.repeat(first, counts)
        base, slope = (np.repeat(x[own], counts, axis=0) for x in (self.base, self.slope))
        return (base + slope * step[:, None, None]).astype(np.int32)


def build_row_runs(runs: LinearRanges, blocks: TokenBlocks) -> RowRuns:
    """The runs of all sequences, cut where blocks begin."""
    of_sequence = np.repeat(starts_of(runs.lengths)[:-1], np.diff(runs.first))
    run_row, block_row = of_sequence + runs.start, starts_of(blocks.tokens)
    of_run = np.searchsorted(block_row, run_row, side="right") - 1
    # The last row of a block goes on as the one before it did.
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
class Messages:
    """Payloads that this rank sends (or receives), ordered by phase, peer, kind, head group, block.

    All payloads of one phase and peer travel as one message. Received results are merged in the
    order in which they stand here."""

    phase: Int32
    peer: Int32
    kind: Int32
    head_group: Int32
    block: Int32

    def __len__(self) -> int:
        return len(self.phase)

    def select(self, chosen: Bool) -> "Messages":
        columns = (self.phase, self.peer, self.kind, self.head_group, self.block)
        return Messages(*(column[chosen] for column in columns))


@dataclass(frozen=True, eq=False)
class Slots:
    """Places of received blocks in the workspaces; `row` is the first row there.

    A slot holds its block from instruction `first` (the WAIT that fills it) to `last`."""

    space: Int32
    head_group: Int32
    block: Int32
    row: Int32
    first: Int32
    last: Int32

    def __len__(self) -> int:
        return len(self.space)


@dataclass(frozen=True, eq=False)
class Program:
    """One direction of one mask on one rank. `instructions` is int32[n, 2]: Op and argument;
    `workspace_rows` is int32[spaces, head groups]."""

    tile_division: Int32
    instructions: Int32
    sends: Messages
    receives: Messages
    slots: Slots
    workspace_rows: Int32


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """The tiles of one mask that a rank computes, the key ranges of their query rows, and the
    programs (backward is None in forward-only plans)."""

    tiles: Tiles
    rows: RowRuns
    forward: Program
    backward: Program | None

    def programs(self) -> Iterator[tuple[Direction, Program]]:
        """The directions that the mask is planned for, with their programs."""
        yield Direction.FORWARD, self.forward
        if self.backward is not None:
            yield Direction.BACKWARD, self.backward

    def program(self, direction: Direction) -> Program:
        program = self.forward if Direction(direction) is Direction.FORWARD else self.backward
        if program is None:
            raise ValueError("this plan was made for evaluation and has no backward schedule")
        return program


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The part of a plan that one rank receives. `digest` is that of the whole plan.

    `body` is the part's binary form without the digest, where it was encoded already (see
    codec.py); a changed copy has none."""

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
    body: bytes | None = field(default=None, init=False, repr=False)

    @property
    def filler(self) -> bool:
        """Whether this batch is a placeholder for a missing one; it has no targets."""
        return False

    @property
    def agreed_by(self) -> tuple[int, ...]:
        """Global ranks that have agreed on this plan; the data loader's plans have some."""
        return ()

    @cached_property
    def local_blocks(self) -> Int64:
        """Blocks this rank owns, in the order of its rows."""
        return np.flatnonzero(self.blocks.owner == self.rank)

    @cached_property
    def tokens_per_rank(self) -> Int64:
        held = np.bincount(self.blocks.owner, self.blocks.tokens, self.num_ranks)
        return held.astype(np.int64)

    @cached_property
    def rows_per_rank(self) -> Int64:
        """Each rank's tokens, padded to `local_multiple`; above 1 also where there are none."""
        return pad_rows(self.tokens_per_rank, self.local_multiple)

    @property
    def local_tokens(self) -> int:
        return int(self.tokens_per_rank[self.rank])

    @cached_property
    def local_rows(self) -> int:
        """Local tokens, padded to `local_multiple`."""
        return int(self.rows_per_rank[self.rank])

    @cached_property
    def block_row(self) -> Int64:
        """First local row of each block this rank owns; -1 for the others."""
        row = np.full(len(self.blocks), -1, np.int64)
        row[self.local_blocks] = starts_of(self.blocks.tokens[self.local_blocks])[:-1]
        return row

    @cached_property
    def block_coordinate(self) -> Int64:
        """Coordinate of each block's first token."""
        return starts_of(self.lengths)[self.blocks.sequence] + self.blocks.start

    @cached_property
    def local_coordinates(self) -> Int64:
        """Coordinate of every local token: its sequence's offset in the batch plus its position."""
        own = self.local_blocks
        return ranges_of(self.block_coordinate[own], self.blocks.tokens[own])

    @cached_property
    def row_coordinates(self) -> Int64:
        """Coordinate of every local row; -1 for rows that only pad."""
        padding = np.full(self.local_rows - self.local_tokens, -1)
        return np.append(self.local_coordinates, padding).astype(np.int64)

    def mask_plan(self, name: str) -> MaskPlan:
        if not isinstance(name, str) or name not in self.masks:
            raise ValueError(f"mask {name!r} is not in this plan; it has {', '.join(self.masks)}")
        return self.masks[name]

    def sent_bytes(self, name: str, direction: Direction, shape: AttentionShape) -> int:
        """Bytes this rank sends in one attention call of `shape`."""
        return int(self.payload_bytes(self.mask_plan(name).program(direction).sends, shape).sum())

    def payload_bytes(self, messages: Messages, shape: AttentionShape) -> Int64:
        """Bytes of every payload in a call of `shape`."""
        per_token = bytes_per_token(shape, self.groups_for(shape))
        size: Int64 = per_token[messages.kind, messages.head_group]
        return size * self.blocks.tokens[messages.block]

    def groups_for(self, shape: AttentionShape) -> tuple[HeadGroup, ...]:
        """Head groups when the plan runs with `shape`; one group adapts to any head count."""
        return self.head_groups if self.shape.exact else shape.head_groups(1)
