"""verify_plan: the static checks of a whole plan, by symbolic execution of all ranks."""

from dyncp.blocks import Batch, Direction
from dyncp.plan import Plan
from dyncp.verify.balance import check_balance
from dyncp.verify.coverage import check_batch, check_rows, check_tiles
from dyncp.verify.identity import check_identity
from dyncp.verify.mail import check_mail
from dyncp.verify.order import check_order
from dyncp.verify.slots import check_slots, fits
from dyncp.verify.structure import check_structure, programs_of
from dyncp.verify.symbolic import run_symbolically
from dyncp.verify.traffic import check_traffic
from dyncp.verify.violation import Findings, PlanError, Violation


def verify_plan(plan: Plan, batch: Batch) -> list[Violation]:
    """All invariants that the plan breaks, each with its sentence; an empty list when it is right.

    A malformed plan gives violations too, never an exception. Invariant 6 belongs to kernel calls,
    which are derived later: see `check_kernel_call`.
    """
    malformed = check_structure(plan)
    if malformed:
        return malformed
    findings = Findings()
    check_identity(plan, batch, findings)
    foreign = list(check_batch(plan, batch))
    for sentence in foreign:
        findings.add(1, sentence)
    if not foreign:
        check_balance(plan, findings)
        for name in plan.parts[0].masks:
            _check_mask(plan, batch, name, findings)
    return findings.violations()


def check_plan(plan: Plan, batch: Batch) -> None:
    """Raises PlanError with all sentences unless the plan keeps its invariants."""
    violations = verify_plan(plan, batch)
    if violations:
        raise PlanError.of(violations)


def _check_mask(plan: Plan, batch: Batch, name: str, findings: Findings) -> None:
    check_tiles(plan, batch, name, findings)
    for part in plan.parts:
        check_rows(part, batch, name, findings)
    for direction in Direction:
        check_traffic(plan, name, direction, findings)
    for direction, _ in programs_of(plan.parts[0].masks[name]):
        _check_direction(plan, name, direction, findings)


def _check_direction(plan: Plan, name: str, direction: Direction, findings: Findings) -> None:
    where = f"mask {name!r}, {direction.name.lower()}"
    programs = [part.masks[name].program(direction) for part in plan.parts]
    check_mail(where, programs, findings)
    for part, program in zip(plan.parts, programs, strict=True):
        check_order(f"{where}, rank {part.rank}", program, findings)
        check_slots(where, part, program, findings)
    if all(fits(part, program) for part, program in zip(plan.parts, programs, strict=True)):
        run_symbolically(plan, name, direction, findings)
