"""Which ranks share a machine: all ranks say where they run, and read the same answer from it."""

import hashlib
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

# Two machines may have the same host name; Linux also has a number for each boot.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def here() -> str:
    """This machine, in a word that no other one has. A container counts as a machine of its own."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def settings_word(ranks_per_machine: int | None, grouped_operations: int, machine: str) -> bytes:
    """What a rank tells the others: 16 bytes of settings, 16 that stand for its machine."""
    place = hashlib.sha256(machine.encode()).digest()[:16]
    return struct.pack("<qq", ranks_per_machine or 0, grouped_operations) + place


def read_machines(words: Sequence[bytes]) -> tuple[int, ...]:
    """The machine of every rank, numbered in the order of their first ranks."""
    odd = [rank for rank, word in enumerate(words) if word[:16] != words[0][:16]]
    if odd:
        raise ValueError(
            f"rank {odd[0]} has {_settings(words[odd[0]])}, rank 0 has {_settings(words[0])}: "
            "give all ranks the same"
        )
    per_machine, _ = struct.unpack("<qq", words[0][:16])
    if per_machine:
        return tuple(rank // per_machine for rank in range(len(words)))
    places = [word[16:] for word in words]
    number = {place: i for i, place in enumerate(dict.fromkeys(places))}
    return tuple(number[place] for place in places)


def _settings(word: bytes) -> str:
    per_machine, operations = struct.unpack("<qq", word[:16])
    return f"ranks_per_machine={per_machine or None}, grouped_operations={operations}"
