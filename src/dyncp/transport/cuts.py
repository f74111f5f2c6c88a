"""How the messages of a phase are cut into grouped calls, in the same order on all ranks.

A message from position s to position r of `count` is of class d = (r − s) mod count. In a class
every rank has at most one send (to d further on) and one receive (from d before), and both ends of
a message give it the same class. Each grouped call takes a fixed range of classes, so both ends of
a message have it in the call of the same number, whatever else they send. Four ranks, two classes
per call; row s, column r, the call of each message:

          0  1  2  3
        0 ·  0  0  1
        1 1  ·  0  0
        2 0  1  ·  0
        3 0  0  1  ·
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank sends and receives in grouped call `number` of a phase: positions of peers."""

    number: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def cut(
    position: int, count: int, sends: Iterable[int], receives: Iterable[int], classes: int
) -> list[Cut]:
    """The grouped calls of the rank at `position`, in order; those without messages are skipped."""
    leaving: dict[int, list[int]] = defaultdict(list)
    coming: dict[int, list[int]] = defaultdict(list)
    for distance, peer in sorted(((peer - position) % count, peer) for peer in sends):
        leaving[(distance - 1) // classes].append(peer)
    for distance, peer in sorted(((position - peer) % count, peer) for peer in receives):
        coming[(distance - 1) // classes].append(peer)
    numbers = sorted({*leaving, *coming})
    return [Cut(k, tuple(leaving.get(k, ())), tuple(coming.get(k, ()))) for k in numbers]
