"""Violation: one broken invariant with its sentence; PlanError: a plan that must not be run."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

INVARIANTS = {
    1: "every allowed (query, key, head) pair is computed exactly once",
    2: "every tile's inputs are on its rank by its division; no slot is reused while needed",
    3: "every send has one receive of the same payload and phase; phases order without cycles",
    4: "every partial result reaches its owner and is merged exactly once, in a fixed order",
    5: "balance limits hold, or the plan says which could not and why",
    6: "the pairs of a kernel call's listed kernel tiles are the pairs of its tiles",
    7: "declared bytes equal the sum of the transfers and respect the hypergraph's bound",
    8: "batch fingerprint and plan digest match",
}

# One fault can show in thousands of places; the first few say what it is. Sentences that differ in
# numbers only are alike.
MAX_ALIKE = 8
_NUMBERS = re.compile(r"\d+(, \d+)*")


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant: its number in `INVARIANTS`, and a sentence that says where and how."""

    invariant: int
    sentence: str

    def __str__(self) -> str:
        return f"[invariant {self.invariant}] {self.sentence}"


class PlanError(ValueError):
    """A plan that violates its invariants; the message has a sentence for each."""

    @staticmethod
    def of(violations: Iterable[Violation]) -> "PlanError":
        return PlanError("the plan must not be run:\n" + "\n".join(f"  {v}" for v in violations))


class Findings:
    """Collects violations, at most `MAX_ALIKE` that differ in numbers only; the rest is counted."""

    def __init__(self) -> None:
        self._alike: dict[tuple[int, str], list[Violation]] = {}
        self._left_out: Counter[tuple[int, str]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._alike)

    def add(self, invariant: int, sentence: str) -> None:
        kind = (invariant, _NUMBERS.sub("#", sentence))
        alike = self._alike.setdefault(kind, [])
        if len(alike) < MAX_ALIKE:
            alike.append(Violation(invariant, sentence))
        else:
            self._left_out[kind] += 1

    def violations(self) -> list[Violation]:
        """All of them, ordered by invariant, with a last sentence for those left out."""
        found = [violation for alike in self._alike.values() for violation in alike]
        for (invariant, kind), count in self._left_out.items():
            found.append(Violation(invariant, f"{count} more like this: {kind}"))
        return sorted(found, key=lambda violation: violation.invariant)
