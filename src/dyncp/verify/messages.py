"""Invariant 3: instructions in order, sends that match receives, programs that finish."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dyncp.plan import Messages, Op, Payload, Program
from dyncp.verify.violation import Findings


def check_order(where: str, program: Program, findings: Findings) -> None:
    """`where` names rank, mask and direction. `plan/check` has seen to it that every instruction
    comes once, and that all that tiles and messages need are there."""
    divisions, phases = set(program.tile_division.tolist()), set(program.receives.phase.tolist())
    launched: list[int] = []
    for op, argument in program.instructions.tolist():
        if op == Op.COMPUTE and argument not in divisions:
            findings.add(1, f"{where}: division {argument} is computed, but has no tiles")
        if op == Op.WAIT and argument not in phases:
            findings.add(3, f"{where}: waits for phase {argument}, in which it receives nothing")
        if op == Op.WAIT and argument not in launched:
            findings.add(3, f"{where}: waits for phase {argument} before launching it")
        if op == Op.LAUNCH:
            if launched and argument < launched[-1]:
                order = f"phase {argument} is launched after phase {launched[-1]}"
                findings.add(3, f"{where}: {order}; order is increasing")
            launched.append(argument)


# A message is identified by (source, target, phase), an entry in it by (kind, head group, block).
MessageKey = tuple[int, int, int]
Entry = tuple[int, int, int]
Phases = dict[int, dict[int, list[Entry]]]  # phase → peer → entries


def entries_by_phase(messages: Messages) -> Phases:
    """Entries in the order of the list."""
    phases: Phases = {}
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
        _compare(where, message, sent.get(message, []), received.get(message, []), findings)


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
    for rows, invariant, side in ((program.sends, 3, "sends"), (program.receives, 4, "receives")):
        order = np.lexsort((rows.block, rows.head_group, rows.kind, rows.peer, rows.phase))
        misplaced = np.flatnonzero(order != np.arange(len(order))).tolist()
        if misplaced:
            findings.add(
                invariant,
                f"{where}, rank {rank}: entry {misplaced[0]} of its {side} (phase "
                f"{rows.phase[misplaced[0]]}) is out of order; the merge order is by phase, peer, "
                "kind, head group and block",
            )


class Actions(Protocol):
    """What the instructions do; `at` is the index of the instruction in the rank's program."""

    def launch(self, rank: int, phase: int, at: int) -> None: ...

    def wait(self, rank: int, phase: int, at: int) -> None: ...

    def compute(self, rank: int, division: int, at: int) -> None: ...


def run_programs(programs: Sequence[Program], actions: Actions) -> list[str]:
    """Runs all programs as far as they go; a sentence for each rank that does not reach its end.

    A wait for a phase returns when every rank that takes part in that phase, and in any phase this
    rank launched before it, has launched them: the strictest transport (grouped messages on one
    stream) finishes phases in the order of their launches. Two ranks can wait for each other:

        rank 0: WAIT 0, LAUNCH 1        waits for rank 1 to launch phase 0
        rank 1: WAIT 1, LAUNCH 0        waits for rank 0 to launch phase 1
    """
    steps = [[(Op(op), argument) for op, argument in p.instructions.tolist()] for p in programs]
    partners = [_partners(program) for program in programs]
    launched: list[list[int]] = [[] for _ in programs]
    act = {Op.LAUNCH: actions.launch, Op.WAIT: actions.wait, Op.COMPUTE: actions.compute}
    position, moved = [0] * len(programs), True

    def missing(rank: int) -> tuple[int, int] | None:
        """A (peer, phase) that the rank's next instruction still needs."""
        op, phase = steps[rank][position[rank]]
        mine = launched[rank]
        if op is not Op.WAIT:
            return None
        if phase not in mine:
            return rank, phase
        for earlier in mine[: mine.index(phase) + 1]:
            for peer in sorted(partners[rank].get(earlier, ())):
                if earlier not in launched[peer]:
                    return peer, earlier
        return None

    while moved:
        moved = False
        for rank, program in enumerate(steps):
            while position[rank] < len(program) and missing(rank) is None:
                op, argument = program[position[rank]]
                if op is Op.LAUNCH:
                    launched[rank].append(argument)
                act[op](rank, argument, position[rank])
                position[rank] += 1
                moved = True
    return [
        f"rank {rank} is stuck at instruction {at} (WAIT {steps[rank][at][1]}): rank {found[0]} "
        f"has not launched phase {found[1]}"
        for rank, at in enumerate(position)
        if at < len(steps[rank]) and (found := missing(rank)) is not None
    ]


def _partners(program: Program) -> dict[int, set[int]]:
    partners: dict[int, set[int]] = {}
    for messages in (program.sends, program.receives):
        for phase, peer in zip(messages.phase.tolist(), messages.peer.tolist(), strict=True):
            partners.setdefault(phase, set()).add(peer)
    return partners
