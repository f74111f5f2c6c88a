"""Decision: which plan a batch gets, and what the deciding rank knows of its samples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dyncp.dataloader.errors import PeerError

MARK = 8  # hex digits: enough to tell samples apart, and there may be a thousand in a batch


@dataclass(frozen=True)
class SampleMark:
    """What a rank says of a sample of a batch: digests of its masks and of all that is taken from
    it ("": not known here)."""

    index: int
    length: int
    masks: str = ""
    content: str = ""

    def difference(self, other: "SampleMark") -> str:
        """What both know and one has otherwise; "" if nothing."""
        for name in ("masks", "content"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                return name
        return ""


@dataclass(frozen=True)
class Decision:
    """Which plan a batch gets. `selection` and `batch` are fingerprints at the deciding rank."""

    static: bool
    rank: int
    selection: str
    batch: str = ""
    digest: str = ""
    solver: str = ""
    seconds: float = 0.0
    sizes: tuple[int, ...] = ()  # bytes of every rank's part
    samples: tuple[SampleMark, ...] = ()
    reason: str = ""

    def encode(self) -> bytes:
        samples = [[m.index, m.length, m.masks, m.content] for m in self.samples]
        return json.dumps(asdict(self) | {"samples": samples}).encode()

    @staticmethod
    def decode(text: bytes) -> "Decision":
        values = read_json(text)
        try:
            samples = tuple(SampleMark(*mark) for mark in values["samples"])
            sizes = tuple(map(int, values["sizes"]))
            return Decision(**values | {"sizes": sizes, "samples": samples})
        except (TypeError, KeyError, ValueError) as error:
            raise PeerError(f"the store has a decision that cannot be read: {error}") from error


def read_json(text: bytes) -> dict[str, Any]:
    """What another rank wrote; PeerError if it cannot be read."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the store has a text that cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise PeerError(f"the store has {type(values).__name__} where a dict was written")
    return values


def first_difference(
    theirs: Sequence[SampleMark], mine: Mapping[int, SampleMark]
) -> tuple[int, str] | None:
    """Number in the batch of the first sample that two ranks have otherwise, and in what."""
    for number, mark in sorted(mine.items()):
        if number < len(theirs) and (what := mark.difference(theirs[number])):
            return number, what
    return None
