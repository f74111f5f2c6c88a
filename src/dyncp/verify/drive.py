"""Drives the programs of all ranks together, with waits that block.

A wait for a phase returns when every rank that takes part in that phase, and in any phase this rank
launched before it, has launched them: the strictest transport (grouped messages on one stream)
finishes phases in the order of their launches. Two ranks that wait for each other are stuck:

    rank 0: WAIT 0, LAUNCH 1        waits for rank 1 to launch phase 0
    rank 1: WAIT 1, LAUNCH 0        waits for rank 0 to launch phase 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dyncp.plan import Op, Program


class Machine(Protocol):
    """What the instructions do; `at` is the index of the instruction in the rank's program."""

    def launch(self, rank: int, phase: int, at: int) -> None: ...

    def wait(self, rank: int, phase: int, at: int) -> None: ...

    def compute(self, rank: int, division: int, at: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that can not go on at instruction `at`, because `peer` has not launched `phase`."""

    rank: int
    at: int
    waits_for: int
    peer: int
    phase: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is stuck at instruction {self.at} (WAIT {self.waits_for}): "
            f"rank {self.peer} has not launched phase {self.phase}"
        )


class _Launches:
    """Who has launched what."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self._partners = [_partners(program) for program in programs]
        self._launched: list[list[int]] = [[] for _ in programs]

    def add(self, rank: int, phase: int) -> None:
        self._launched[rank].append(phase)

    def missing(self, rank: int, phase: int) -> tuple[int, int] | None:
        """A (peer, phase) that a wait for `phase` still needs; None when it can return."""
        mine = self._launched[rank]
        if phase not in mine:
            return rank, phase
        for earlier in mine[: mine.index(phase) + 1]:
            for peer in sorted(self._partners[rank].get(earlier, ())):
                if earlier not in self._launched[peer]:
                    return peer, earlier
        return None


def _partners(program: Program) -> dict[int, set[int]]:
    partners: dict[int, set[int]] = {}
    for messages in (program.sends, program.receives):
        for phase, peer in zip(messages.phase.tolist(), messages.peer.tolist(), strict=True):
            partners.setdefault(phase, set()).add(peer)
    return partners


def drive(programs: Sequence[Program], machine: Machine) -> list[Stuck]:
    """Runs all programs as far as they go; the ranks that do not reach their ends come back."""
    steps = [[(Op(op), argument) for op, argument in p.instructions.tolist()] for p in programs]
    launches, position, moved = _Launches(programs), [0] * len(programs), True

    def blocked(rank: int) -> tuple[int, int] | None:
        op, argument = steps[rank][position[rank]]
        return launches.missing(rank, argument) if op is Op.WAIT else None

    while moved:
        moved = False
        for rank, program in enumerate(steps):
            while position[rank] < len(program) and blocked(rank) is None:
                op, argument = program[position[rank]]
                if op is Op.LAUNCH:
                    launches.add(rank, argument)
                _do(machine, op, rank, argument, position[rank])
                position[rank] += 1
                moved = True
    return [
        Stuck(rank, at, steps[rank][at][1], *missing)
        for rank, at in enumerate(position)
        if at < len(steps[rank]) and (missing := blocked(rank)) is not None
    ]


def _do(machine: Machine, op: Op, rank: int, argument: int, at: int) -> None:
    if op is Op.LAUNCH:
        machine.launch(rank, argument, at)
    elif op is Op.WAIT:
        machine.wait(rank, argument, at)
    else:
        machine.compute(rank, argument, at)
