"""Order of a rank's instructions: divisions computed once (1), phases launched and awaited (3)."""

from collections import Counter
from itertools import pairwise

from dyncp.plan import Op, Program
from dyncp.verify.violation import Findings


def check_order(where: str, program: Program, findings: Findings) -> None:
    """`where` names rank, mask and direction."""
    steps = [(Op(op), argument) for op, argument in program.instructions.tolist()]
    _check_divisions(where, program, steps, findings)
    _check_launches(where, program, steps, findings)
    _check_waits(where, program, steps, findings)


def _arguments(steps: list[tuple[Op, int]], op: Op) -> list[int]:
    return [argument for step, argument in steps if step is op]


def _check_divisions(
    where: str, program: Program, steps: list[tuple[Op, int]], findings: Findings
) -> None:
    computed = Counter(_arguments(steps, Op.COMPUTE))
    tiles = Counter(program.tile_division.tolist())
    for division in sorted(computed.keys() | tiles.keys()):
        if not tiles[division]:
            findings.add(1, f"{where}: division {division} is computed, but has no tiles")
        elif computed[division] != 1:
            times = "never" if not computed[division] else f"{computed[division]} times"
            findings.add(
                1, f"{where}: division {division} ({tiles[division]} tiles) is computed {times}"
            )


def _check_launches(
    where: str, program: Program, steps: list[tuple[Op, int]], findings: Findings
) -> None:
    launched = _arguments(steps, Op.LAUNCH)
    for phase, count in Counter(launched).items():
        if count > 1:
            findings.add(3, f"{where}: phase {phase} is launched {count} times")
    for before, after in pairwise(launched):
        if after < before:
            findings.add(
                3, f"{where}: phase {after} is launched after phase {before}; order is increasing"
            )
    needed = {*program.sends.phase.tolist(), *program.receives.phase.tolist()}
    for phase in sorted(needed - set(launched)):
        findings.add(3, f"{where}: phase {phase} has messages, but is never launched")


def _check_waits(
    where: str, program: Program, steps: list[tuple[Op, int]], findings: Findings
) -> None:
    waited, needed = Counter(_arguments(steps, Op.WAIT)), set(program.receives.phase.tolist())
    for phase, count in waited.items():
        if count > 1:
            findings.add(3, f"{where}: phase {phase} is waited for {count} times")
        if phase not in needed:
            findings.add(3, f"{where}: waits for phase {phase}, in which it receives nothing")
    for phase in sorted(needed - waited.keys()):
        findings.add(3, f"{where}: phase {phase} brings messages, but is never waited for")
    launched: set[int] = set()
    for op, argument in steps:
        if op is Op.LAUNCH:
            launched.add(argument)
        elif op is Op.WAIT and argument not in launched:
            findings.add(3, f"{where}: waits for phase {argument} before launching it")
