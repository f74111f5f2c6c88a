"""Messages between ranks: what one sends, the other receives (3), listed in the fixed order (4)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dyncp.plan import Messages, Payload, Program
from dyncp.verify.violation import Findings

# A message is known by (source, target, phase), an entry in it by (kind, head group, block).
Envelope = tuple[int, int, int]
Entry = tuple[int, int, int]


def entries_by_phase(messages: Messages) -> dict[int, dict[int, list[Entry]]]:
    """phase → peer → entries, in the order of the list."""
    mail: dict[int, dict[int, list[Entry]]] = {}
    columns = (messages.phase, messages.peer, messages.kind, messages.head_group, messages.block)
    for phase, peer, kind, group, block in zip(*(c.tolist() for c in columns), strict=True):
        mail.setdefault(phase, {}).setdefault(peer, []).append((kind, group, block))
    return mail


def describe(entry: Entry) -> str:
    kind, group, block = entry
    return f"{Payload(kind).name} of block {block}, head group {group}"


def check_mail(where: str, programs: Sequence[Program], findings: Findings) -> None:
    """Compares all ranks' sends with all ranks' receives; `where` names mask and direction."""
    sent: dict[Envelope, list[Entry]] = {}
    received: dict[Envelope, list[Entry]] = {}
    for rank, program in enumerate(programs):
        for phase, peers in entries_by_phase(program.sends).items():
            sent |= {(rank, peer, phase): entries for peer, entries in peers.items()}
        for phase, peers in entries_by_phase(program.receives).items():
            received |= {(peer, rank, phase): entries for peer, entries in peers.items()}
        _check_listed(where, rank, program, findings)
    for envelope in sorted(sent.keys() | received.keys()):
        pair = (sent.get(envelope, []), received.get(envelope, []))
        _compare(where, envelope, *pair, findings)


def _compare(
    where: str, envelope: Envelope, sent: list[Entry], received: list[Entry], findings: Findings
) -> None:
    if sent == received and len(set(sent)) == len(sent):
        return
    source, target, phase = envelope
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
    """Results are merged as they are listed, so the list's order is the merge order."""
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
