"""verify_plan: the static checks of a whole plan, by symbolic execution of all ranks."""

from dataclasses import dataclass

from dyncp.blocks import Batch, Direction
from dyncp.checks import instance_of
from dyncp.plan import Plan
from dyncp.verify.coverage import check_batch, check_rows, check_tiles
from dyncp.verify.declared import check_balance, check_identity, check_traffic
from dyncp.verify.messages import check_mail, check_order
from dyncp.verify.structure import check_parts
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
    check_mail(where, programs, findings)
    for part, program in zip(plan.parts, programs, strict=True):
        check_order(f"{where}, rank {part.rank}", program, findings)
        check_slots(where, part, program, findings)
    if not all(fits(part, program) for part, program in zip(plan.parts, programs, strict=True)):
        return False
    run_symbolically(plan, name, direction, findings)
    return True
