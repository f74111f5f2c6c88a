"""Invariant 2, the part that needs no run: slots lie in their workspace and never on each other."""

from collections.abc import Iterator

import numpy as np

from dyncp.arrays import Bool, Int64
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
