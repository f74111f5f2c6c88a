"""RankState: what one rank holds while its program is executed symbolically.

Every row of a workspace knows which block was written there last, and every block's accumulator
knows the tiles that went into it. Nothing is computed, so plans of any size can be followed.
"""

from dataclasses import dataclass, field

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.plan import Program, RankPlan, Space
from dyncp.verify.slots import local_rows, name_slot
from dyncp.verify.violation import Findings

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
    """Rows, slots and accumulators of one rank in one direction of one mask."""

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
        """Whether all rows of the block's place hold the block; counts as a use of its slot."""
        if key not in self._place:
            return False
        if key in self._slot:
            self._used[self._slot[key]] = at
        return bool((self._rows_of(key) == key[2]).all())

    def found(self, key: Key) -> str:
        """What is in the block's place, for a sentence."""
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
