"""Invariants 2 to 4 by symbolic execution of all ranks: slots do not overlap while in use, inputs
are there in time, sends follow what they need, and partial results come home exactly once."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.blocks import Direction
from dyncp.plan import INPUT_SPACE, RESULT_SPACE, Plan, Program, RankPlan, RankTiles, Slots, Space
from dyncp.verify.coverage import AllTiles, collect_tiles, tile_key
from dyncp.verify.messages import Entry, Phases, describe, entries_by_phase, run_programs
from dyncp.verify.violation import Findings

# Which side of the tiles accumulates a result: out in forward, dq and dk, dv in backward.
ACCUMULATING = {Direction.FORWARD: (Space.Q,), Direction.BACKWARD: (Space.Q, Space.KV)}
_SPACE_OF_KIND = {int(k): int(s) for k, s in (INPUT_SPACE | RESULT_SPACE).items()}
_EMPTY: Int64 = np.zeros(0, np.int64)

Key = tuple[int, int, int]  # space, head group, block
# Division → blocks that its tiles read, each with the numbers of these tiles.
Work = dict[int, list[tuple[Key, Int64]]]


def check_slots(where: str, part: RankPlan, program: Program, findings: Findings) -> None:
    """`where` names mask, direction and rank. `plan/check` has seen to it that slots lie inside
    their workspaces and off the local rows."""
    slots = program.slots
    unaligned: Bool = slots.row % part.slot_alignment != 0
    for wrong, sentence in (
        (unaligned, f"is off the borders of {part.slot_alignment} rows"),
        (part.blocks.owner[slots.block] == part.rank, "is for a block that the rank owns"),
        (slots.last < slots.first, "ends before it begins"),
    ):
        for index in np.flatnonzero(wrong).tolist():
            findings.add(2, f"{where}: {name_slot(program, index)} {sentence}")
    _check_one_each(where, program, findings)
    ends = slots.row.astype(np.int64) + part.blocks.tokens[slots.block]
    _check_overlap(where, program, ends, findings)


def name_slot(program: Program, index: int) -> str:
    slots = program.slots
    return (
        f"the {Space(slots.space[index]).name} slot of block {slots.block[index]}, head group "
        f"{slots.head_group[index]} (row {slots.row[index]}, instructions {slots.first[index]} to "
        f"{slots.last[index]})"
    )


def _check_one_each(where: str, program: Program, findings: Findings) -> None:
    slots = program.slots
    keys = np.stack([slots.space, slots.head_group, slots.block], axis=1)
    _, first, count = np.unique(keys, axis=0, return_index=True, return_counts=True)
    for index in first[count > 1]:
        findings.add(2, f"{where}: {name_slot(program, int(index))} is not the block's only one")


def _check_overlap(where: str, program: Program, ends: Int64, findings: Findings) -> None:
    """Goes through the slots as they begin and marks on every row until when it is taken."""
    slots = program.slots
    workspaces = np.unique(np.stack([slots.space, slots.head_group], axis=1), axis=0)
    for space, group in workspaces.tolist():
        mine = np.flatnonzero((slots.space == space) & (slots.head_group == group))
        mine = mine[np.argsort(slots.first[mine], kind="stable")]
        for index, other in _clashes(slots, mine, ends[mine]):
            findings.add(
                2,
                f"{where}: {name_slot(program, index)} is on rows that "
                f"{name_slot(program, other)} still holds",
            )


def _clashes(slots: Slots, mine: Int64, ends: Int64) -> Iterator[tuple[int, int]]:
    """Slots, ordered by their beginning, that lie on rows of a slot that has not ended."""
    starts = slots.row[mine]
    # Rows between two borders are used by the same slots.
    borders = np.unique(np.concatenate([starts, ends]))
    first, last = (np.searchsorted(borders, rows).tolist() for rows in (starts, ends))
    until, holder = np.full((2, len(borders)), -1, np.int64)
    for index, begin, end in zip(mine.tolist(), first, last, strict=True):
        busy = until[begin:end] >= slots.first[index]
        if busy.any():
            yield index, int(holder[begin:end][busy][0])
        holder[begin:end] = np.where(until[begin:end] < slots.last[index], index, holder[begin:end])
        until[begin:end] = np.maximum(until[begin:end], slots.last[index])


@dataclass(slots=True)
class Partial:
    """Tiles that a block's accumulator on one rank holds, and what still has to come into it."""

    tiles: list[Int64] = field(default_factory=list)
    uncomputed: int = 0
    unmerged: int = 0
    sent_in: int | None = None
    merged_in: int = -1

    def content(self) -> Int64:
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self.tiles]))


class RankState:
    """What one rank holds while its program is executed symbolically, for one mask and direction.

    Every workspace row knows which block was written there last, and every block's accumulator the
    tiles that went into it. Nothing is computed, so plans of any size can be followed."""

    def __init__(self, where: str, part: RankPlan, program: Program, findings: Findings) -> None:
        self.where = f"{where}, rank {part.rank}"
        self._program, self._findings = program, findings
        self._tokens = (part.blocks.end - part.blocks.start).tolist()
        self.owns = part.blocks.owner == part.rank
        self._rows = _own_rows(part, program)
        self._place = np.tile(part.block_row, (*program.workspace_rows.shape, 1))
        slots = program.slots
        self._place[slots.space, slots.head_group, slots.block] = slots.row
        keys = np.stack([slots.space, slots.head_group, slots.block], axis=1).tolist()
        self._slot: dict[Key, int] = {tuple(key): index for index, key in enumerate(keys)}
        self._filled: Int64 = np.full(len(slots), -1, np.int64)
        self._used: Int64 = np.full(len(slots), -1, np.int64)
        self.partials: dict[Key, Partial] = defaultdict(Partial)

    def report(self, invariant: int, sentence: str) -> None:
        self._findings.add(invariant, f"{self.where}: {sentence}")

    def holds(self, key: Key, at: int) -> bool:
        """Whether all of the block's rows hold it; counts as a use of its slot."""
        if key in self._slot:
            self._used[self._slot[key]] = at
        return bool((self._rows_of(key) == key[2]).all())

    def describe_rows(self, key: Key) -> str:
        """What is in the block's rows, for a sentence."""
        others = np.setdiff1d(self._rows_of(key), [key[2], -1]).tolist()
        return f"its rows hold block {others[0]} by then" if others else "it has not arrived yet"

    def fill(self, key: Key, at: int) -> None:
        """An input arrives: its slot holds the block from now on, with an empty accumulator."""
        if key not in self._slot:
            self.report(2, f"receives {_name(key)}, but has no slot for it")
            return
        index = self._slot[key]
        if self._filled[index] >= 0:
            self.report(2, f"{name_slot(self._program, index)} is filled a second time")
        self._filled[index] = self._used[index] = at
        self._rows_of(key)[:] = key[2]
        partial = self.partials[key]
        if partial.tiles:
            self.report(4, f"the partial {_name(key)} is lost, because its input arrives again")
        partial.tiles = []

    def check_lifetimes(self) -> None:
        """Slots are taken from the wait that fills them until at least their last use."""
        slots, empty = self._program.slots, self._filled < 0
        for wrong, sentence in (
            (empty, "is never filled"),
            (~empty & (slots.first != self._filled), "is filled by another instruction"),
            (self._used > slots.last, "is used after its end"),
        ):
            for index in np.flatnonzero(wrong).tolist():
                last = "" if self._used[index] < 0 else f", last used by {self._used[index]}"
                self.report(2, f"{name_slot(self._program, index)} {sentence}{last}")

    def _rows_of(self, key: Key) -> Int32:
        row = self._place[key]
        return self._rows[key[:2]][row : row + self._tokens[key[2]]]


def _own_rows(part: RankPlan, program: Program) -> dict[tuple[int, ...], Int32]:
    """The block in every row of every workspace: own blocks from row 0 on, then -1 for nothing."""
    own = np.repeat(part.local_blocks, part.blocks.tokens[part.local_blocks])
    found = {}
    for space_and_group in np.ndindex(program.workspace_rows.shape):
        rows = np.full(program.workspace_rows[space_and_group], -1, np.int32)
        rows[: len(own)] = own
        found[space_and_group] = rows
    return found


def run_symbolically(plan: Plan, name: str, direction: Direction, findings: Findings) -> None:
    """Follows the programs of all ranks and reports what goes wrong on the way and at the end."""
    programs = [part.masks[name].program(direction) for part in plan.parts]
    where = f"mask {name!r}, {direction.name.lower()}"
    actions = _SymbolicRun(where, plan, name, direction, findings)
    stuck = run_programs(programs, actions)
    for rank in stuck:
        findings.add(3, f"{where}: {rank}")
    if not stuck:
        actions.check_end(collect_tiles(plan, name))


class _SymbolicRun:
    """Carries tile numbers between the ranks' accumulators instead of rows."""

    def __init__(
        self, where: str, plan: Plan, name: str, direction: Direction, findings: Findings
    ) -> None:
        programs = [part.masks[name].program(direction) for part in plan.parts]
        self._accumulating = ACCUMULATING[direction]
        self._static = plan.parts[0].static  # static methods send empty partials too
        self._sends = [entries_by_phase(program.sends) for program in programs]
        self._receives = [entries_by_phase(program.receives) for program in programs]
        self._in_flight: dict[tuple[int, int, int], dict[Entry, Int64]] = {}
        pairs = list(zip(plan.parts, programs, strict=True))
        self._states = [RankState(where, part, program, findings) for part, program in pairs]
        self._work = [_work_of(part, part.masks[name].tiles, program) for part, program in pairs]
        for state, work, receives in zip(self._states, self._work, self._receives, strict=True):
            self._expect(state, work, receives)

    def _expect(self, state: RankState, work: Work, receives: Phases) -> None:
        """Counts what has to come into every accumulator before it is complete."""
        for key, tiles in chain.from_iterable(work.values()):
            if key[0] in self._accumulating:
                state.partials[key].uncomputed += len(tiles)
        for entry in (e for peers in receives.values() for some in peers.values() for e in some):
            if entry[0] in RESULT_SPACE:
                state.partials[_key(entry)].unmerged += 1

    def launch(self, rank: int, phase: int, at: int) -> None:
        for peer, entries in self._sends[rank].get(phase, {}).items():
            self._in_flight[rank, peer, phase] = {
                entry: self._pack(self._states[rank], entry, phase, at) for entry in entries
            }

    def _pack(self, state: RankState, entry: Entry, phase: int, at: int) -> Int64:
        key = _key(entry)
        if not state.holds(key, at):
            invariant = 3 if entry[0] in INPUT_SPACE else 4
            _report(state, invariant, "sends", entry, phase, f", but {state.describe_rows(key)}")
        if entry[0] in INPUT_SPACE:
            return _EMPTY
        partial = state.partials[key]
        for invariant, wrong, sentence in (
            (4, state.owns[key[2]], ", but owns the block: results go to the owner"),
            (3, partial.uncomputed, " before all of its tiles are computed"),
            (3, partial.unmerged, " before all other ranks' results are merged into it"),
            (4, partial.sent_in is not None, ", but sent it already"),
            (4, not partial.tiles and not self._static, ", but no tile has contributed to it"),
        ):
            if wrong:
                _report(state, invariant, "sends", entry, phase, sentence)
        partial.sent_in = phase
        return partial.content()

    def wait(self, rank: int, phase: int, at: int) -> None:
        state = self._states[rank]
        for peer, entries in self._receives[rank].get(phase, {}).items():
            message = self._in_flight.get((peer, rank, phase), {})
            for entry in entries:
                if entry not in message:
                    continue  # nobody sends it, which the comparison of messages reports
                if entry[0] in INPUT_SPACE:
                    state.fill(_key(entry), at)
                else:
                    self._merge(state, entry, message[entry], phase, at)

    def _merge(self, state: RankState, entry: Entry, tiles: Int64, phase: int, at: int) -> None:
        key = _key(entry)
        partial = state.partials[key]
        if not state.holds(key, at):
            _report(state, 4, "merges", entry, phase, f", but {state.describe_rows(key)}")
        if partial.sent_in is not None:
            sentence = f" after it sent its own partial in phase {partial.sent_in}"
            _report(state, 4, "merges", entry, phase, sentence)
        if partial.merged_in > phase:
            sentence = f" out of order, after phase {partial.merged_in}"
            _report(state, 4, "merges", entry, phase, sentence)
        partial.merged_in = phase
        partial.unmerged -= 1
        partial.tiles.append(tiles)

    def compute(self, rank: int, division: int, at: int) -> None:
        state = self._states[rank]
        for key, tiles in self._work[rank].get(division, []):
            if not state.holds(key, at):
                sentence = f"division {division} reads {_name(key)}, but {state.describe_rows(key)}"
                state.report(2, sentence)
            if key[0] not in self._accumulating:
                continue
            partial = state.partials[key]
            partial.tiles.append(tiles)
            partial.uncomputed -= len(tiles)
            if partial.sent_in is not None:
                state.report(
                    4,
                    f"division {division} computes {len(tiles)} tiles into {_name(key)} after "
                    f"their partial result was sent in phase {partial.sent_in}",
                )

    def check_end(self, tiles: AllTiles) -> None:
        """Owners hold every tile of their blocks once; nothing is left elsewhere."""
        expected = _tiles_of_blocks(tiles, self._accumulating)
        for state in self._states:
            state.check_lifetimes()
            mine = {key for key in expected if state.owns[key[2]]}
            for key in sorted(mine | state.partials.keys()):
                partial = state.partials[key]
                if state.owns[key[2]]:
                    _compare(state, key, partial.content(), expected.get(key, _EMPTY))
                elif partial.tiles and partial.sent_in is None:
                    state.report(4, f"the partial {_name(key)} is never sent to its owner")


def _compare(state: RankState, key: Key, merged: Int64, expected: Int64) -> None:
    if np.array_equal(merged, expected):
        return
    missing, surplus = np.setdiff1d(expected, merged), np.setdiff1d(merged, expected)
    numbers, counts = np.unique(merged, return_counts=True)
    asked = np.searchsorted(expected, numbers, "right") - np.searchsorted(expected, numbers)
    doubled = numbers[(counts > asked) & (asked > 0)]
    state.report(
        4,
        f"the {Space(key[0]).name} result of its block {key[2]}, head group {key[1]} has "
        f"{len(missing)} tiles missing, {len(doubled)} merged more than once and {len(surplus)} "
        "of other blocks",
    )


def _key(entry: Entry) -> Key:
    """Where a payload lives."""
    kind, group, block = entry
    return _SPACE_OF_KIND[kind], group, block


def _name(key: Key) -> str:
    return f"{Space(key[0]).name} of block {key[2]}, head group {key[1]}"


def _report(
    state: RankState, invariant: int, verb: str, entry: Entry, phase: int, sentence: str
) -> None:
    state.report(invariant, f"{verb} {describe(entry)} in phase {phase}{sentence}")


def _work_of(part: RankPlan, tiles: RankTiles, program: Program) -> Work:
    columns = (tiles.q_block, tiles.k_block, tiles.head_group)
    q_block, k_block, group = (column.astype(np.int64) for column in columns)
    number = tile_key(q_block, k_block, group, part)
    work: Work = {}
    for space, side in ((Space.Q, q_block), (Space.KV, k_block)):
        grouped = _grouped(np.stack([program.tile_division, group, side]), number)
        for (division, head_group, block), numbers in grouped:
            work.setdefault(division, []).append(((int(space), head_group, block), numbers))
    return work


def _tiles_of_blocks(tiles: AllTiles, spaces: tuple[Space, ...]) -> dict[Key, Int64]:
    """Sorted numbers of all tiles of every (space, head group, block), over all ranks."""
    found: dict[Key, Int64] = {}
    for space in spaces:
        side = tiles.q_block if space is Space.Q else tiles.k_block
        for (group, block), numbers in _grouped(np.stack([tiles.head_group, side]), tiles.key):
            found[int(space), group, block] = np.sort(numbers)
    return found


def _grouped(columns: Int32 | Int64, values: Int64) -> Iterator[tuple[tuple[int, ...], Int64]]:
    """Values with equal columns together: columns [[1, 0, 1]] and values [5, 6, 7] give
    (0,): [6] and (1,): [5, 7]."""
    if not len(values):
        return
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    first = np.flatnonzero(np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)))
    pieces = np.split(values[order], first[1:])
    for head, piece in zip(ordered[:, first].T.tolist(), pieces, strict=True):
        yield tuple(head), piece
