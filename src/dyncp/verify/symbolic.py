"""Invariants 2 to 4, by symbolic execution of all ranks: inputs arrive in time, payloads are sent
when they are complete, and every partial result reaches its owner exactly once."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import IS_INPUT, Direction
from dyncp.plan import MaskPlan, Plan, Program, RankPlan, Space
from dyncp.verify.programs import (
    Entry,
    Fault,
    Key,
    RunningRank,
    check_messages,
    check_order,
    check_slots,
    describe,
    key_of,
    name_slot,
    run_programs,
)

# Blocks with results: query blocks have out and dq, key blocks have dk and dv.
ACCUMULATING = {Direction.FORWARD: (Space.Q,), Direction.BACKWARD: (Space.Q, Space.KV)}
_EMPTY: Int64 = np.zeros(0, np.int64)


def check_programs(plan: Plan, name: str, direction: Direction) -> Iterator[Fault]:
    """Checks invariants 2 to 4 of one mask and direction. Relies on `plan/check`: no instruction is
    repeated or missing, and slots are inside their workspaces, after the local rows."""
    where = f"mask {name!r}, {direction.name.lower()}"
    ranks = [_SymbolicRank(part, part.masks[name], direction) for part in plan.parts]
    for sentence in check_messages(ranks):
        yield 3, f"{where}, {sentence}"
    stuck = run_programs(ranks)
    for sentence in stuck:
        yield 3, f"{where}: {sentence}"
    if not stuck:
        _check_end(ranks)
    for rank in ranks:
        slots = ((2, sentence) for sentence in check_slots(rank.part, rank.program))
        for invariant, sentence in chain(check_order(rank), slots, rank.faults):
            yield invariant, f"{where}, rank {rank.part.rank}: {sentence}"


@dataclass(slots=True)
class _Partial:
    """A block's accumulator on one rank: the tiles in it, and how many contributions it lacks."""

    tiles: list[Int64] = field(default_factory=list)
    uncomputed: int = 0  # tiles of this rank
    unmerged: int = 0  # results of other ranks
    sent_in: int | None = None  # phase
    merged_in: int = -1  # last phase

    def content(self) -> Int64:
        return np.sort(np.concatenate([_EMPTY, *self.tiles]))


class _SymbolicRank(RunningRank):
    """Tracks which block was last written to every workspace row, and which tiles are in every
    block's accumulator. It computes no attention, so it can run plans of any size.

    Tile i of rank r has number i × ranks + r."""

    def __init__(self, part: RankPlan, mask: MaskPlan, direction: Direction) -> None:
        super().__init__(part, mask, direction)
        self.faults: list[Fault] = []
        self.owns = part.blocks.owner == part.rank
        rows = self.program.workspace_rows
        own = np.repeat(part.local_blocks, part.blocks.tokens[part.local_blocks])
        # The block in every row of every workspace; -1 if empty.
        self._rows = np.full((*rows.shape, int(rows.max())), -1, np.int32)
        self._rows[:, :, : len(own)] = own
        self._filled, self._used = np.full((2, len(self.program.slots)), -1, np.int64)
        self.partials: dict[Key, _Partial] = defaultdict(_Partial)
        self._work = _work_of(part, mask, self.program)
        for key, tiles in self.results():
            self.partials[key].uncomputed += len(tiles)
        for peers in self.receives.values():
            for entry in chain.from_iterable(peers.values()):
                if not IS_INPUT[entry[0]]:
                    self.partials[key_of(entry)].unmerged += 1

    def results(self) -> Iterator[tuple[Key, Int64]]:
        """Every accumulator that tiles are added to, with the tiles of one division."""
        for key, tiles in chain.from_iterable(self._work.values()):
            if key[0] in ACCUMULATING[self.direction]:
                yield key, tiles

    def report(self, invariant: int, sentence: str) -> None:
        self.faults.append((invariant, sentence))

    def _missing(self, key: Key, at: int) -> str:
        """Why the block's rows do not hold it, or "" if they do. Records a use of its slot."""
        if key in self.slot_of:
            self._used[self.slot_of[key]] = at
        rows = self._rows[key[:2]][self.rows_of(key)]
        if (rows == key[2]).all():
            return ""
        others = np.setdiff1d(rows, [key[2], -1]).tolist()
        return f"its rows hold block {others[0]} by then" if others else "it has not arrived yet"

    def pack(self, entries: Sequence[Entry], phase: int, at: int) -> dict[Entry, Int64]:
        """The numbers of the tiles in each result."""
        return {entry: self._send(entry, phase, at) for entry in entries}

    def _send(self, entry: Entry, phase: int, at: int) -> Int64:
        key, is_input = key_of(entry), bool(IS_INPUT[entry[0]])
        what = f"sends {describe(entry)} in phase {phase}"
        if missing := self._missing(key, at):
            self.report(3 if is_input else 4, f"{what}, but {missing}")
        if is_input:
            return _EMPTY
        partial = self.partials[key]
        # Static methods also send empty partial results.
        empty = not partial.tiles and not self.part.static
        for invariant, wrong, sentence in (
            (4, self.owns[key[2]], ", but owns the block: results go to the owner"),
            (3, partial.uncomputed, " before all of its tiles are computed"),
            (3, partial.unmerged, " before all other ranks' results are merged into it"),
            (4, partial.sent_in is not None, ", but sent it already"),
            (4, empty, ", but no tile has contributed to it"),
        ):
            if wrong:
                self.report(invariant, what + sentence)
        partial.sent_in = phase
        return partial.content()

    def unpack(self, entries: Sequence[Entry], message: Any, phase: int, at: int) -> None:
        for entry in entries:
            if message is None or entry not in message:
                continue  # not sent, which `check_messages` reports
            if IS_INPUT[entry[0]]:
                self._fill(key_of(entry), at)
            else:
                self._merge(entry, message[entry], phase, at)

    def _fill(self, key: Key, at: int) -> None:
        """Stores a received input in its slot, with an empty accumulator."""
        if key not in self.slot_of:
            self.report(2, f"receives {_name(key)}, but has no slot for it")
            return
        index = self.slot_of[key]
        if self._filled[index] >= 0:
            self.report(2, f"{name_slot(self.program.slots, index)} is filled a second time")
        self._filled[index] = self._used[index] = at
        self._rows[key[:2]][self.rows_of(key)] = key[2]
        if self.partials[key].tiles:
            self.report(4, f"the partial {_name(key)} is lost, because its input arrives again")
        self.partials[key].tiles = []

    def _merge(self, entry: Entry, tiles: Int64, phase: int, at: int) -> None:
        key, what = key_of(entry), f"merges {describe(entry)} in phase {phase}"
        partial = self.partials[key]
        if missing := self._missing(key, at):
            self.report(4, f"{what}, but {missing}")
        if partial.sent_in is not None:
            self.report(4, f"{what} after it sent its own partial in phase {partial.sent_in}")
        if partial.merged_in > phase:
            self.report(4, f"{what} out of order, after phase {partial.merged_in}")
        partial.merged_in = phase
        partial.unmerged -= 1
        partial.tiles.append(tiles)

    def compute(self, division: int, at: int) -> None:
        for key, tiles in self._work.get(division, []):
            if missing := self._missing(key, at):
                self.report(2, f"division {division} reads {_name(key)}, but {missing}")
            if key[0] not in ACCUMULATING[self.direction]:
                continue
            partial = self.partials[key]
            partial.tiles.append(tiles)
            partial.uncomputed -= len(tiles)
            if partial.sent_in is not None:
                self.report(
                    4,
                    f"division {division} computes {len(tiles)} tiles into {_name(key)} after "
                    f"their partial result was sent in phase {partial.sent_in}",
                )

    def check_lifetimes(self) -> None:
        """Checks that slots begin at the WAIT that fills them, and do not end before their last
        use."""
        slots, empty = self.program.slots, self._filled < 0
        for wrong, sentence in (
            (empty, "is never filled"),
            (~empty & (slots.first != self._filled), "is filled by another instruction"),
            (self._used > slots.last, "is used after its end"),
        ):
            for index in np.flatnonzero(wrong).tolist():
                last = "" if self._used[index] < 0 else f", last used by {self._used[index]}"
                self.report(2, f"{name_slot(slots, index)} {sentence}{last}")


def _name(key: Key) -> str:
    return f"{Space(key[0]).name} of block {key[2]}, head group {key[1]}"


def _work_of(
    part: RankPlan, mask: MaskPlan, program: Program
) -> dict[int, list[tuple[Key, Int64]]]:
    """By division: the blocks that its tiles read, each with the numbers of these tiles."""
    tiles, work = mask.tiles, dict[int, list[tuple[Key, Int64]]]()
    if not len(tiles):
        return work
    for space, side in ((Space.Q, tiles.q_block), (Space.KV, tiles.k_block)):
        order = np.lexsort((side, tiles.head_group, program.tile_division))
        columns = np.stack([program.tile_division, tiles.head_group, side])[:, order]
        first = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
        numbers = np.split(order * part.num_ranks + part.rank, first)
        heads = columns[:, np.append(0, first)].T.tolist()
        for (division, group, block), some in zip(heads, numbers, strict=True):
            work.setdefault(division, []).append(((int(space), group, block), some))
    return work


def _check_end(ranks: Sequence[_SymbolicRank]) -> None:
    """Checks that owners hold every tile of their blocks once, and that other ranks have sent all
    their partial results."""
    expected: dict[Key, list[Int64]] = defaultdict(list)
    for key, tiles in chain.from_iterable(rank.results() for rank in ranks):
        expected[key].append(tiles)
    for rank in ranks:
        rank.check_lifetimes()
        mine = {key for key in expected if rank.owns[key[2]]}
        for key in sorted(mine | rank.partials.keys()):
            partial = rank.partials[key]
            if rank.owns[key[2]]:
                wanted = np.concatenate([_EMPTY, *expected.get(key, [])])
                _compare_tiles(rank, key, partial.content(), np.sort(wanted))
            elif partial.tiles and partial.sent_in is None:
                rank.report(4, f"the partial {_name(key)} is never sent to its owner")


def _compare_tiles(rank: _SymbolicRank, key: Key, merged: Int64, wanted: Int64) -> None:
    if np.array_equal(merged, wanted):
        return
    missing, surplus = np.setdiff1d(wanted, merged), np.setdiff1d(merged, wanted)
    numbers, counts = np.unique(merged, return_counts=True)
    doubled = np.intersect1d(numbers[counts > 1], wanted)
    rank.report(
        4,
        f"the {Space(key[0]).name} result of its block {key[2]}, head group {key[1]} has "
        f"{len(missing)} tiles missing, {len(doubled)} merged more than once and {len(surplus)} "
        "of other blocks",
    )
