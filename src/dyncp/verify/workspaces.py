"""Invariant 2: slots never overlap while in use, and what each rank's workspaces hold."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.plan import Program, RankPlan, Slots, Space
from dyncp.verify.violation import Findings


def local_rows(part: RankPlan) -> int:
    """Own tokens of a rank, padded to `local_multiple`; above 1 also where there are none."""
    own = part.blocks.owner == part.rank
    tokens = int((part.blocks.end[own] - part.blocks.start[own]).sum())
    if not tokens:
        return part.local_multiple if part.local_multiple > 1 else 0
    return -(-tokens // part.local_multiple) * part.local_multiple


def slot_ends(part: RankPlan, program: Program) -> Int64:
    """First row behind each slot."""
    block, row = program.slots.block, program.slots.row.astype(np.int64)
    return row + part.blocks.end[block] - part.blocks.start[block]


def fits(part: RankPlan, program: Program) -> bool:
    """Whether the workspaces can be laid out at all: own rows and slots inside, sizes sensible."""
    own, slots = local_rows(part), program.slots
    room = own + int((slot_ends(part, program) - slots.row + part.slot_alignment).sum())
    room += part.slot_alignment
    rows = program.workspace_rows
    inside = (slots.row >= 0) & (slot_ends(part, program) <= rows[slots.space, slots.head_group])
    return bool((rows >= own).all() and (rows <= room).all() and inside.all())


def check_slots(where: str, part: RankPlan, program: Program, findings: Findings) -> None:
    """`where` names mask and direction."""
    where = f"{where}, rank {part.rank}"
    _check_workspaces(where, part, program, findings)
    slots, own = program.slots, local_rows(part)
    ends = slot_ends(part, program)
    outside = ends > program.workspace_rows[slots.space, slots.head_group]
    unaligned: Bool = slots.row % part.slot_alignment != 0
    for wrong, sentence in (
        (slots.row < own, f"lies on the {own} own rows"),
        (outside, "leaves its workspace"),
        (unaligned, f"is off the borders of {part.slot_alignment} rows"),
        (part.blocks.owner[slots.block] == part.rank, "is for a block that the rank owns"),
        (slots.last < slots.first, "ends before it begins"),
        (slots.last >= len(program.instructions), "ends behind the last instruction"),
    ):
        for index in np.flatnonzero(wrong):
            findings.add(2, f"{where}: {name_slot(program, int(index))} {sentence}")
    _check_one_each(where, program, findings)
    _check_overlap(where, program, ends, findings)


def name_slot(program: Program, index: int) -> str:
    slots = program.slots
    return (
        f"the {Space(slots.space[index]).name} slot of block {slots.block[index]}, head group "
        f"{slots.head_group[index]} (row {slots.row[index]}, instructions {slots.first[index]} to "
        f"{slots.last[index]})"
    )


def _check_workspaces(where: str, part: RankPlan, program: Program, findings: Findings) -> None:
    own = local_rows(part)
    for space in Space:
        for group, rows in enumerate(program.workspace_rows[space].tolist()):
            if rows < own:
                findings.add(
                    2,
                    f"{where}: the {space.name} workspace of head group {group} has {rows} rows "
                    f"for {own} own ones",
                )
    if not fits(part, program):
        findings.add(2, f"{where}: slots and workspaces of {own} own rows do not fit together")


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
    borders = np.unique(np.concatenate([starts, ends]))  # rows between two borders are taken alike
    first, last = (np.searchsorted(borders, rows).tolist() for rows in (starts, ends))
    until, holder = np.full((2, len(borders)), -1, np.int64)
    for index, begin, end in zip(mine.tolist(), first, last, strict=True):
        busy = until[begin:end] >= slots.first[index]
        if busy.any():
            yield index, int(holder[begin:end][busy][0])
        holder[begin:end] = np.where(until[begin:end] < slots.last[index], index, holder[begin:end])
        until[begin:end] = np.maximum(until[begin:end], slots.last[index])


Key = tuple[int, int, int]  # space, head group, block


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
        self._place, self._rows = _own_rows(part, program, self.owns)
        self._slot: dict[Key, int] = {}
        slots = program.slots
        keys = zip(
            slots.space.tolist(), slots.head_group.tolist(), slots.block.tolist(), strict=True
        )
        for index, key in enumerate(keys):
            self._slot[key] = index
            self._place[key] = int(slots.row[index])
        self._filled: Int64 = np.full(len(slots), -1, np.int64)
        self._used: Int64 = np.full(len(slots), -1, np.int64)
        self.partials: dict[Key, Partial] = {}

    def report(self, invariant: int, sentence: str) -> None:
        self._findings.add(invariant, f"{self.where}: {sentence}")

    def partial(self, key: Key) -> Partial:
        if key not in self.partials:
            self.partials[key] = Partial()
        return self.partials[key]

    def holds(self, key: Key, at: int) -> bool:
        """Whether all of the block's rows hold it; counts as a use of its slot."""
        if key not in self._place:
            return False
        if key in self._slot:
            self._used[self._slot[key]] = at
        return bool((self._rows_of(key) == key[2]).all())

    def describe_rows(self, key: Key) -> str:
        """What is in the block's rows, for a sentence."""
        if key not in self._place:
            return "it neither owns the block nor has a slot for it"
        others = np.setdiff1d(self._rows_of(key), [key[2], -1]).tolist()
        return (
            f"its rows hold block {others[0]} by then" if others else "it has not arrived by then"
        )

    def fill(self, key: Key, at: int) -> None:
        """An input arrives: its slot holds the block from now on, with an empty accumulator."""
        if key not in self._slot:
            name = f"{Space(key[0]).name} of block {key[2]}, head group {key[1]}"
            self.report(2, f"receives {name}, but has no slot for it")
            return
        index = self._slot[key]
        if self._filled[index] >= 0:
            self.report(2, f"{name_slot(self._program, index)} is filled a second time")
        self._filled[index] = self._used[index] = at
        self._rows_of(key)[:] = key[2]
        partial = self.partial(key)
        if partial.tiles:
            name = f"{Space(key[0]).name} of block {key[2]}, head group {key[1]}"
            self.report(4, f"the partial {name} is lost, because its input arrives again")
        partial.tiles = []

    def check_lifetimes(self) -> None:
        """Slots are taken from the wait that fills them until at least their last use."""
        slots = self._program.slots
        for wrong, sentence in (
            (self._filled < 0, "is never filled"),
            (
                (self._filled >= 0) & (slots.first != self._filled),
                "is filled by another instruction",
            ),
            (self._used > slots.last, "is used after its end"),
        ):
            for index in np.flatnonzero(wrong).tolist():
                last = "" if self._used[index] < 0 else f", last used by {self._used[index]}"
                self.report(2, f"{name_slot(self._program, index)} {sentence}{last}")

    def _rows_of(self, key: Key) -> Int32:
        row = self._place[key]
        return self._rows[key[:2]][row : row + self._tokens[key[2]]]


def _own_rows(
    part: RankPlan, program: Program, owns: np.ndarray
) -> tuple[dict[Key, int], dict[tuple[int, int], Int32]]:
    """Own blocks lie from row 0 on, in batch order, in every workspace; other rows hold nothing."""
    blocks = np.flatnonzero(owns).astype(np.int32)
    tokens = (part.blocks.end - part.blocks.start)[blocks]
    first = (np.cumsum(tokens) - tokens).tolist()
    own = np.full(local_rows(part), -1, np.int32)
    own[: int(tokens.sum())] = np.repeat(blocks, tokens)
    place: dict[Key, int] = {}
    rows: dict[tuple[int, int], Int32] = {}
    for space in Space:
        for group, count in enumerate(program.workspace_rows[space].tolist()):
            rows[int(space), group] = np.full(count, -1, np.int32)
            rows[int(space), group][: len(own)] = own
            place |= {
                (int(space), group, b): r for b, r in zip(blocks.tolist(), first, strict=True)
            }
    return place, rows
