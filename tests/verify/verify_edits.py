"""Functions that edit plans, for the catalogue of faults.

Edited plans get a new digest, so that the digest does not give the fault away.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import numpy as np

from dyncp.arrays import frozen
from dyncp.plan import (
    Direction,
    MaskPlan,
    Messages,
    Op,
    Payload,
    Plan,
    Program,
)

NAME = "default"
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
Step = tuple[int, int]


@dataclass(frozen=True)
class Fault:
    """A named fault: the invariant that it breaks, words that the violation must contain, and
    whether the interpreter shows it, by wrong results or by an error."""

    make: Callable[[Plan], Plan]
    invariant: int
    word: str
    numerical: bool

    @property
    def name(self) -> str:
        return self.make.__name__


_FAULTS: list[Fault] = []


def fault(
    invariant: int, word: str, *, numerical: bool
) -> Callable[[Callable[[Plan], Plan]], Callable[[Plan], Plan]]:
    def register(make: Callable[[Plan], Plan]) -> Callable[[Plan], Plan]:
        _FAULTS.append(Fault(make, invariant, word, numerical))
        return make

    return register


def faults_of(module: ModuleType) -> list[Fault]:
    """The faults that a module of the catalogue defines, in its order."""
    return [fault for fault in _FAULTS if fault.make.__module__ == module.__name__]


def with_part(plan: Plan, rank: int, **changes: Any) -> Plan:
    parts = list(plan.parts)
    parts[rank] = replace(parts[rank], **changes)
    return Plan.of(parts)


def with_mask(plan: Plan, rank: int, **changes: Any) -> Plan:
    part = plan.parts[rank]
    return with_part(plan, rank, masks={**part.masks, NAME: replace(part.masks[NAME], **changes)})


def with_program(plan: Plan, rank: int, direction: Direction, **changes: Any) -> Plan:
    program = replace(program_of(plan, rank, direction), **changes)
    return with_mask(plan, rank, **{direction.name.lower(): program})


def with_steps(plan: Plan, rank: int, direction: Direction, steps: list[Step]) -> Plan:
    return with_program(plan, rank, direction, instructions=frozen(np.reshape(steps, (-1, 2))))


def with_column(table: Any, column: str, index: Any, value: Any) -> Any:
    values = getattr(table, column).copy()
    values[index] = value
    return replace(table, **{column: frozen(values, values.dtype.type)})


def mask_of(plan: Plan, rank: int) -> MaskPlan:
    return plan.parts[rank].masks[NAME]


def program_of(plan: Plan, rank: int, direction: Direction) -> Program:
    return mask_of(plan, rank).program(direction)


def steps_of(plan: Plan, rank: int, direction: Direction) -> list[Step]:
    return [tuple(step) for step in program_of(plan, rank, direction).instructions.tolist()]


def rows_of(table: Any) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(table, f.name).tolist() for f in fields(table)), strict=True))


def table_of(cls: Any, rows: list[tuple[int, ...]]) -> Any:
    columns = np.asarray(rows, np.int64).reshape(-1, len(fields(cls))).T
    wide = {"pairs": np.int64}
    return cls(
        *(frozen(c, wide.get(f.name, np.int32)) for f, c in zip(fields(cls), columns, strict=True))
    )


def with_rows(plan: Plan, rank: int, direction: Direction, side: str, rows: list) -> Plan:
    """Replaces the sends or receives of a rank; rows are put in the plan's order."""
    return with_program(plan, rank, direction, **{side: table_of(Messages, sorted(rows))})


def ranks_of(plan: Plan) -> range:
    return range(plan.num_ranks)


def transfers(plan: Plan, direction: Direction, *kinds: Payload) -> Iterator[tuple[int, tuple]]:
    """(source, row of its sends) of all transfers of these kinds."""
    for rank in ranks_of(plan):
        for row in rows_of(program_of(plan, rank, direction).sends):
            if row[2] in kinds:
                yield rank, row


def tokens(plan: Plan, block: int) -> int:
    return int(plan.parts[0].blocks.tokens[block])


def owner(plan: Plan, block: int) -> int:
    return int(plan.parts[0].blocks.owner[block])


def in_company(plan: Plan, direction: Direction, *kinds: Payload) -> tuple[int, tuple]:
    """A transfer that is not the only payload of its message."""
    for rank, row in transfers(plan, direction, *kinds):
        alike = [r for r in rows_of(program_of(plan, rank, direction).sends) if r[:2] == row[:2]]
        if len(alike) > 1:
            return rank, row
    raise LookupError


def mirrored(rank: int, row: tuple) -> tuple:
    """A sender's row as the receiver lists it."""
    return (row[0], rank, *row[2:])


def resent(
    plan: Plan, direction: Direction, rank: int, row: tuple, source: int, target: int
) -> Plan:
    """The transfer `row` of `rank` goes from `source` to `target` instead, on both lists."""
    moved = {
        (rank, "sends"): (row, None),
        (row[1], "receives"): (mirrored(rank, row), None),
        (source, "sends"): (None, (row[0], target, *row[2:])),
        (target, "receives"): (None, (row[0], source, *row[2:])),
    }
    if source == rank:
        moved[rank, "sends"] = (row, (row[0], target, *row[2:]))
    if target == row[1]:
        moved[target, "receives"] = (mirrored(rank, row), (row[0], source, *row[2:]))
    for (at, side), (old, new) in moved.items():
        rows = rows_of(getattr(program_of(plan, at, direction), side))
        rows = [r for r in rows if r != old] + ([new] if new else [])
        plan = with_phase(with_rows(plan, at, direction, side, rows), at, direction, row[0])
    return plan


def with_phase(plan: Plan, rank: int, direction: Direction, phase: int) -> Plan:
    """Launches (and waits for) the phase if the rank did not take part in it before."""
    program, steps = program_of(plan, rank, direction), steps_of(plan, rank, direction)
    missing = []
    if phase in program.receives.phase and (Op.WAIT, phase) not in steps:
        missing.append((Op.WAIT, phase))
    if (Op.LAUNCH, phase) not in steps:
        missing.insert(0, (Op.LAUNCH, phase))
    return with_steps(plan, rank, direction, [*steps, *missing])


def doubled_step(steps: list[Step], step: Step) -> list[int]:
    at = steps.index(step)
    return [*range(at + 1), at, *range(at + 1, len(steps))]
