"""Invariant 3: instructions in order, sends that match receives, programs that finish."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from dyncp.plan import Messages, Op, Payload, Program
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


# A message is identified by (source, target, phase), an entry in it by (kind, head group, block).
MessageKey = tuple[int, int, int]
Entry = tuple[int, int, int]


def entries_by_phase(messages: Messages) -> dict[int, dict[int, list[Entry]]]:
    """phase → peer → entries, in the order of the list."""
    phases: dict[int, dict[int, list[Entry]]] = {}
    columns = (messages.phase, messages.peer, messages.kind, messages.head_group, messages.block)
    for phase, peer, kind, group, block in zip(*(c.tolist() for c in columns), strict=True):
        phases.setdefault(phase, {}).setdefault(peer, []).append((kind, group, block))
    return phases


def describe(entry: Entry) -> str:
    kind, group, block = entry
    return f"{Payload(kind).name} of block {block}, head group {group}"


def check_messages(where: str, programs: Sequence[Program], findings: Findings) -> None:
    """Compares all ranks' sends with all ranks' receives; `where` names mask and direction."""
    sent: dict[MessageKey, list[Entry]] = {}
    received: dict[MessageKey, list[Entry]] = {}
    for rank, program in enumerate(programs):
        for phase, peers in entries_by_phase(program.sends).items():
            sent |= {(rank, peer, phase): entries for peer, entries in peers.items()}
        for phase, peers in entries_by_phase(program.receives).items():
            received |= {(peer, rank, phase): entries for peer, entries in peers.items()}
        _check_listed(where, rank, program, findings)
    for message in sorted(sent.keys() | received.keys()):
        pair = (sent.get(message, []), received.get(message, []))
        _compare(where, message, *pair, findings)


def _compare(
    where: str, message: MessageKey, sent: list[Entry], received: list[Entry], findings: Findings
) -> None:
    if sent == received and len(set(sent)) == len(sent):
        return
    source, target, phase = message
    for given, asked, sentence in (
        (sent, received, f"rank {source} sends {{}} to rank {target}, which has no receive for it"),
        (received, sent, f"rank {target} receives {{}} from rank {source}, which does not send it"),
    ):
        for entry in Counter(given) - Counter(asked):
            findings.add(3, f"{where}, phase {phase}: {sentence.format(describe(entry))}")
    if sent != received and Counter(sent) == Counter(received):
        findings.add(
            3,
            f"{where}, phase {phase}: the message from rank {source} to rank {target} lists its "
            "payloads in one order at the sender and in another at the receiver",
        )
    for entry, count in Counter(sent).items():
        if count > 1:
            findings.add(
                3,
                f"{where}, phase {phase}: rank {source} sends {describe(entry)} {count} times "
                f"to rank {target}",
            )


def _check_listed(where: str, rank: int, program: Program, findings: Findings) -> None:
    """Received results are merged in the order of the list, which is therefore fixed."""
    for messages, invariant, side in (
        (program.sends, 3, "sends"),
        (program.receives, 4, "receives"),
    ):
        columns = (
            messages.block,
            messages.head_group,
            messages.kind,
            messages.peer,
            messages.phase,
        )
        order = np.lexsort(columns)
        misplaced = np.flatnonzero(order != np.arange(len(order)))
        if len(misplaced):
            first = int(misplaced[0])
            findings.add(
                invariant,
                f"{where}, rank {rank}: entry {first} of its {side} (phase "
                f"{messages.phase[first]}) is out of order; the merge order is by phase, peer, "
                "kind, head group and block",
            )


class Actions(Protocol):
    """What the instructions do; `at` is the index of the instruction in the rank's program."""

    def launch(self, rank: int, phase: int, at: int) -> None: ...

    def wait(self, rank: int, phase: int, at: int) -> None: ...

    def compute(self, rank: int, division: int, at: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that cannot go on at instruction `at`, because `peer` has not launched `phase`."""

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


class _LaunchedPhases:
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


def run_programs(programs: Sequence[Program], actions: Actions) -> list[Stuck]:
    """Runs all programs as far as they go; returns the ranks that do not reach their ends.

    A wait for a phase returns when every rank that takes part in that phase, and in any phase this
    rank launched before it, has launched them: the strictest transport (grouped messages on one
    stream) finishes phases in the order of their launches. Two ranks can wait for each other:

        rank 0: WAIT 0, LAUNCH 1        waits for rank 1 to launch phase 0
        rank 1: WAIT 1, LAUNCH 0        waits for rank 0 to launch phase 1
    """
    steps = [[(Op(op), argument) for op, argument in p.instructions.tolist()] for p in programs]
    launches, position, moved = _LaunchedPhases(programs), [0] * len(programs), True

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
                _do(actions, op, rank, argument, position[rank])
                position[rank] += 1
                moved = True
    return [
        Stuck(rank, at, steps[rank][at][1], *missing)
        for rank, at in enumerate(position)
        if at < len(steps[rank]) and (missing := blocked(rank)) is not None
    ]


def _do(actions: Actions, op: Op, rank: int, argument: int, at: int) -> None:
    if op is Op.LAUNCH:
        actions.launch(rank, argument, at)
    elif op is Op.WAIT:
        actions.wait(rank, argument, at)
    else:
        actions.compute(rank, argument, at)
