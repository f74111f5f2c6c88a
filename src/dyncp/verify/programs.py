"""Runs the programs of all ranks (`run_programs`), and checks them without running: sends match
receives, instructions and payloads are in order, slots do not overlap while in use.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dyncp.arrays import Bool, Int64
from dyncp.blocks import OF_KEYS, Direction
from dyncp.plan import MaskPlan, Messages, Op, Payload, Program, RankPlan, Slots, Space

Fault = tuple[int, str]  # the broken invariant, and a sentence
Entry = tuple[int, int, int]  # one payload of a message: kind, head group, block
Key = tuple[int, int, int]  # where a block is stored: space, head group, block
Phases = dict[int, dict[int, list[Entry]]]  # phase → peer → entries, in the order of the message


class RunningRank(ABC):
    """One rank's program: its steps, its messages by phase and peer, and the rows of every block.
    Subclasses implement the instructions; `at` is the index of the current one."""

    def __init__(self, part: RankPlan, mask: MaskPlan, direction: Direction) -> None:
        self.part, self.mask, self.direction = part, mask, direction
        self.program: Program = mask.program(direction)
        self.steps = [(Op(op), argument) for op, argument in self.program.instructions.tolist()]
        self.sends, self.receives = map(_by_phase, (self.program.sends, self.program.receives))
        slots = self.program.slots
        self._row = np.tile(part.block_row, (*self.program.workspace_rows.shape, 1))
        self._row[slots.space, slots.head_group, slots.block] = slots.row
        self._tokens = part.blocks.tokens.tolist()
        columns = (slots.space, slots.head_group, slots.block)
        keys = zip(*(column.tolist() for column in columns), strict=True)
        self.slot_of: dict[Key, int] = {key: index for index, key in enumerate(keys)}

    def rows_of(self, key: Key) -> slice:
        row = int(self._row[key])
        return slice(row, row + self._tokens[key[2]])

    def partners(self, phase: int) -> list[int]:
        return sorted(self.sends.get(phase, {}).keys() | self.receives.get(phase, {}).keys())

    @abstractmethod
    def pack(self, entries: Sequence[Entry], phase: int, at: int) -> Any:
        """Returns the message to one peer."""

    @abstractmethod
    def unpack(self, entries: Sequence[Entry], message: Any, phase: int, at: int) -> None:
        """Takes the message that a peer packed, or None if the peer sends nothing."""

    @abstractmethod
    def compute(self, division: int, at: int) -> None: ...


def _by_phase(messages: Messages) -> Phases:
    phases: Phases = {}
    for phase, peer, *entry in zip(*(c.tolist() for c in messages.columns()), strict=True):
        phases.setdefault(phase, {}).setdefault(peer, []).append(tuple(entry))
    return phases


def key_of(entry: Entry) -> Key:
    """The rows that a payload is read from or written to."""
    kind, group, block = entry
    return int(OF_KEYS[kind]), group, block


def describe(entry: Entry) -> str:
    kind, group, block = entry
    return f"{Payload(kind).name} of block {block}, head group {group}"


def run_programs(ranks: Sequence[RunningRank]) -> list[str]:
    """Runs all programs until no rank can continue; returns a sentence for each rank that is stuck.

    A wait for a phase ends when all its partners have launched it, and also all phases that this
    rank launched before it: the strictest transport (grouped messages on one stream) finishes
    phases in launch order. Two ranks can wait for each other:

        rank 0: WAIT 0, LAUNCH 1        waits for rank 1 to launch phase 0
        rank 1: WAIT 1, LAUNCH 0        waits for rank 0 to launch phase 1
    """
    launched: list[list[int]] = [[] for _ in ranks]
    position, in_flight, moved = [0] * len(ranks), dict[tuple[int, int, int], Any](), True

    def missing(rank: int) -> tuple[int, int] | None:
        """A (peer, phase) that the rank's next instruction waits for, or None."""
        op, phase = ranks[rank].steps[position[rank]]
        mine = launched[rank]
        if op is not Op.WAIT:
            return None
        if phase not in mine:
            return rank, phase
        for earlier in mine[: mine.index(phase) + 1]:
            for peer in ranks[rank].partners(earlier):
                if earlier not in launched[peer]:
                    return peer, earlier
        return None

    def act(rank: int, at: int) -> None:
        this, (op, argument) = ranks[rank], ranks[rank].steps[at]
        if op is Op.COMPUTE:
            this.compute(argument, at)
        elif op is Op.LAUNCH:
            launched[rank].append(argument)
            for peer, entries in this.sends.get(argument, {}).items():
                in_flight[rank, peer, argument] = this.pack(entries, argument, at)
        else:
            for peer, entries in this.receives.get(argument, {}).items():
                message = in_flight.pop((peer, rank, argument), None)
                this.unpack(entries, message, argument, at)

    while moved:
        moved = False
        for rank, this in enumerate(ranks):
            while position[rank] < len(this.steps) and missing(rank) is None:
                act(rank, position[rank])
                position[rank] += 1
                moved = True
    return [
        f"rank {rank} is stuck at instruction {at} (WAIT {ranks[rank].steps[at][1]}): rank "
        f"{found[0]} has not launched phase {found[1]}"
        for rank, at in enumerate(position)
        if at < len(ranks[rank].steps) and (found := missing(rank)) is not None
    ]


def check_messages(ranks: Sequence[RunningRank]) -> Iterator[str]:
    """Compares the sends and the receives of all ranks, by (source, target, phase)."""
    sent: dict[tuple[int, int, int], list[Entry]] = {}
    received: dict[tuple[int, int, int], list[Entry]] = {}
    for rank, this in enumerate(ranks):
        for phase, peers in this.sends.items():
            sent |= {(rank, peer, phase): entries for peer, entries in peers.items()}
        for phase, peers in this.receives.items():
            received |= {(peer, rank, phase): entries for peer, entries in peers.items()}
    for message in sorted(sent.keys() | received.keys()):
        for sentence in _compare(*message[:2], sent.get(message, []), received.get(message, [])):
            yield f"phase {message[2]}: {sentence}"


def _compare(source: int, target: int, sent: list[Entry], received: list[Entry]) -> Iterator[str]:
    if sent == received and len(set(sent)) == len(sent):
        return
    given, asked = Counter(sent), Counter(received)
    for entry in given - asked:
        yield (
            f"rank {source} sends {describe(entry)} to rank {target}, which has no receive for it"
        )
    for entry in asked - given:
        yield (
            f"rank {target} receives {describe(entry)} from rank {source}, which does not send it"
        )
    if sent != received and given == asked:
        yield (
            f"the message from rank {source} to rank {target} has its payloads in one order at the "
            "sender and in another at the receiver"
        )
    for entry, count in given.items():
        if count > 1:
            yield f"rank {source} sends {describe(entry)} {count} times to rank {target}"


def check_order(rank: RunningRank) -> Iterator[Fault]:
    """Checks the order of launches and of payloads. Received results are merged in the order of
    the list, so that order must be fixed."""
    program = rank.program
    launched = [argument for op, argument in rank.steps if op is Op.LAUNCH]
    for earlier, later in pairwise(launched):
        if later < earlier:
            late = f"phase {later} is launched after phase {earlier}"
            yield 3, f"{late}; phases must be launched in increasing order"
    for rows, invariant, side in ((program.sends, 3, "sends"), (program.receives, 4, "receives")):
        order = np.lexsort((rows.block, rows.head_group, rows.kind, rows.peer, rows.phase))
        misplaced = np.flatnonzero(order != np.arange(len(order))).tolist()
        if misplaced:
            yield (
                invariant,
                f"entry {misplaced[0]} of its {side} (phase {rows.phase[misplaced[0]]}) is out of "
                "order; the merge order is by phase, peer, kind, head group and block",
            )


def check_slots(part: RankPlan, program: Program) -> Iterator[str]:
    slots = program.slots
    keys = np.stack([slots.space, slots.head_group, slots.block], axis=1)
    _, first, count = np.unique(keys, axis=0, return_index=True, return_counts=True)
    repeated: Bool = np.isin(np.arange(len(slots)), first[count > 1])
    for wrong, sentence in (
        (slots.row % part.slot_alignment != 0, f"is off the borders of {part.slot_alignment} rows"),
        (part.blocks.owner[slots.block] == part.rank, "is for a block that the rank owns"),
        (slots.last < slots.first, "ends before it begins"),
        (repeated, "is not the block's only one"),
    ):
        for index in np.flatnonzero(wrong).tolist():
            yield f"{name_slot(slots, index)} {sentence}"
    ends = slots.row.astype(np.int64) + part.blocks.tokens[slots.block]
    for space, group in np.unique(keys[:, :2], axis=0).tolist():
        mine = np.flatnonzero((slots.space == space) & (slots.head_group == group))
        mine = mine[np.argsort(slots.first[mine], kind="stable")]
        for index, other in _clashes(slots, mine, ends[mine]):
            held = f"is on rows that {name_slot(slots, other)} still holds"
            yield f"{name_slot(slots, index)} {held}"


def name_slot(slots: Slots, index: int) -> str:
    return (
        f"the {Space(slots.space[index]).name} slot of block {slots.block[index]}, head group "
        f"{slots.head_group[index]} (row {slots.row[index]}, instructions {slots.first[index]} to "
        f"{slots.last[index]})"
    )


def _clashes(slots: Slots, mine: Int64, ends: Int64) -> Iterator[tuple[int, int]]:
    """Pairs (slot, other) in which the slot begins on rows that the other still holds. `mine` has
    the slots of one workspace, ordered by first instruction, `ends` their last rows + 1."""
    starts = slots.row[mine]
    # Rows between two borders belong to the same slots. For each such range of rows: until which
    # instruction it is held, and by which slot.
    borders = np.unique(np.concatenate([starts, ends]))
    first, last = (np.searchsorted(borders, rows).tolist() for rows in (starts, ends))
    until, holder = np.full((2, len(borders)), -1, np.int64)
    for index, begin, end in zip(mine.tolist(), first, last, strict=True):
        busy = until[begin:end] >= slots.first[index]
        if busy.any():
            yield index, int(holder[begin:end][busy][0])
        holder[begin:end] = np.where(until[begin:end] < slots.last[index], index, holder[begin:end])
        until[begin:end] = np.maximum(until[begin:end], slots.last[index])
