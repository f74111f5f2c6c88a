"""verify_plan: the static checks of a whole plan, by symbolic execution of all ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from dyncp.blocks import Batch, Direction
from dyncp.checks import instance_of
from dyncp.plan import PartError, Plan, RankPlan, check_structure
from dyncp.verify.coverage import check_batch, check_rows, check_tiles
from dyncp.verify.declared import check_balance, check_identity, check_traffic
from dyncp.verify.messages import check_messages, check_order
from dyncp.verify.symbolic import run_symbolically
from dyncp.verify.violation import INVARIANTS, Findings, PlanError, Violation
from dyncp.verify.workspaces import check_slots, fits

# Those that a plan alone can break; kernel calls (6) are derived later.
OF_PLANS = frozenset(INVARIANTS) - {6}


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found, and which invariants were looked at in full: a fault can hide what a later
    check would need."""

    violations: tuple[Violation, ...]
    checked: frozenset[int]

    def of(self, invariant: int) -> list[Violation]:
        return [violation for violation in self.violations if violation.invariant == invariant]


def verify_plan(plan: Plan, batch: Batch) -> list[Violation]:
    """All invariants that the plan breaks, each with its sentence; an empty list when it is right.

    A malformed plan gives violations too, never an exception; what is no plan at all raises
    ValueError. Invariant 6 belongs to kernel calls, which are derived later: see
    `check_kernel_call`.
    """
    return list(examine_plan(plan, batch).violations)


def examine_plan(plan: Plan, batch: Batch) -> Verified:
    """`verify_plan`, with the invariants that it could check."""
    instance_of("the plan to verify", plan, Plan, "a whole Plan")
    instance_of("its batch", batch, Batch, "the Batch it was made for")
    malformed = check_parts(plan)
    if malformed:
        return Verified(tuple(malformed), frozenset())
    findings, checked = Findings(), OF_PLANS
    check_identity(plan, batch, findings)
    foreign = list(check_batch(plan, batch))
    for sentence in foreign:
        findings.add(1, sentence)
    if foreign:
        return Verified(tuple(findings.violations()), frozenset({8}))
    check_balance(plan, findings)
    for name in plan.parts[0].masks:
        if not _check_mask(plan, batch, name, findings):
            checked -= {4}
    return Verified(tuple(findings.violations()), checked)


def check_plan(plan: Plan, batch: Batch) -> None:
    """Raises PlanError with all sentences unless the plan keeps its invariants."""
    violations = verify_plan(plan, batch)
    if violations:
        raise PlanError.of(violations)


def _check_mask(plan: Plan, batch: Batch, name: str, findings: Findings) -> bool:
    """False where slots fit so little that the programs were not followed."""
    check_tiles(plan, batch, name, findings)
    for part in plan.parts:
        check_rows(part, batch, name, findings)
    for direction in Direction:
        check_traffic(plan, name, direction, findings)
    followed = [
        _check_direction(plan, name, direction, findings)
        for direction, _ in plan.parts[0].masks[name].programs()
    ]
    return all(followed)


def _check_direction(plan: Plan, name: str, direction: Direction, findings: Findings) -> bool:
    where = f"mask {name!r}, {direction.name.lower()}"
    programs = [part.masks[name].program(direction) for part in plan.parts]
    check_messages(where, programs, findings)
    for part, program in zip(plan.parts, programs, strict=True):
        check_order(f"{where}, rank {part.rank}", program, findings)
        check_slots(where, part, program, findings)
    if not all(fits(part, program) for part, program in zip(plan.parts, programs, strict=True)):
        return False
    run_symbolically(plan, name, direction, findings)
    return True


def check_parts(plan: Plan) -> list[Violation]:
    """The first structural fault of each part; while there is one, nothing else is looked at."""
    if not plan.parts:
        return [Violation(8, "the plan has no parts")]
    found = [v for index, part in enumerate(plan.parts) for v in _faults(plan, index, part)]
    return found or [Violation(1, sentence) for sentence in _differences(plan)]


def _faults(plan: Plan, index: int, part: RankPlan) -> list[Violation]:
    try:
        if part.rank != index:
            raise PartError(8, f"the part in this place is of rank {part.rank}")
        if part.num_ranks != len(plan.parts):
            raise PartError(
                8, f"the part is of {part.num_ranks} ranks, the plan of {len(plan.parts)}"
            )
        _check_dtypes(part, "part")
        check_structure(part)
    except PartError as fault:
        return [Violation(fault.invariant, f"rank {index}: {fault}")]
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        return [Violation(1, f"rank {index}: the part is malformed: {error!r}")]
    return []


def _check_dtypes(item: Any, name: str) -> None:
    """Parts that were never encoded may hold anything."""
    if isinstance(item, np.ndarray):
        if item.dtype not in (np.int32, np.int64):
            raise PartError(1, f"{name} holds {item.dtype}")
    elif is_dataclass(item):
        for entry in fields(item):
            _check_dtypes(getattr(item, entry.name), f"{name}.{entry.name}")
    elif isinstance(item, dict):
        for key, value in item.items():
            _check_dtypes(value, f"{name}[{key!r}]")


def _differences(plan: Plan) -> Iterator[str]:
    """What all parts must say alike, and do not."""
    first = plan.parts[0]
    for part in plan.parts[1:]:
        alike = {
            "shape": part.shape == first.shape,
            "head groups": part.head_groups == first.head_groups,
            "local multiple": part.local_multiple == first.local_multiple,
            "sequence lengths": np.array_equal(part.lengths, first.lengths),
            "masks": part.masks.keys() == first.masks.keys(),
        }
        for column in ("sequence", "start", "end", "owner"):
            same = np.array_equal(getattr(part.blocks, column), getattr(first.blocks, column))
            alike[f"block table (column {column})"] = same
        for name in part.masks.keys() & first.masks.keys():
            same = (part.masks[name].backward is None) == (first.masks[name].backward is None)
            alike[f"backward program of mask {name!r}"] = same
        for what, same in alike.items():
            if not same:
                yield f"rank {part.rank}: its {what} differs from that of rank 0"
