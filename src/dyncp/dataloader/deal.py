"""Deals batches to replicas, so that those of a round take about equally long.

A round takes the oldest batch, so that none waits for ever, and those of the window that leave the
replicas idle for the shortest time beside it. With 3 replicas and predicted seconds

    waiting, oldest first    4 9 5 4 8 5        in order of time    4 4 5 5 8 9

rounds are 4 4 5, then 9 8 5. Batches keep their numbers, so that what is dealt to another number of
replicas are the same batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dyncp.dataloader.fill import FilledBatch, FillState


@dataclass(frozen=True)
class DealState:
    """Between two rounds: `fill` is the state before the oldest batch that waits, or behind all
    that were read; `dealt` says which ones from there on do not wait (1 is the second one). Those
    that more replicas dealt are kept until fewer have come past them."""

    fill: FillState
    dealt: tuple[int, ...] = ()


def deal_rounds(
    batches: Iterator[FilledBatch],
    replicas: int,
    window: int,
    seconds: Callable[[FilledBatch], float],
    start: DealState,
) -> Iterator[tuple[list[FilledBatch], DealState]]:
    """Rounds of one batch per replica (the last one may have fewer), with the state after each.

    Each is chosen among the next `window` × `replicas` batches; `batches` begin where `start` says.
    """
    most = window * replicas if replicas > 1 else 1
    waiting: list[tuple[FilledBatch, float]] = []
    dealt: set[int] | None = None  # numbers of batches after the oldest that waits
    end, following = start.fill, 0  # the state behind the last batch that was read; the next one
    while True:
        while len(waiting) < most and (batch := next(batches, None)) is not None:
            if dealt is None:
                dealt = {batch.number + offset for offset in start.dealt}
            if batch.number not in dealt:
                waiting.append((batch, seconds(batch) if replicas > 1 else 0.0))
            end, following = batch.after, batch.number + 1
        if not waiting:
            return
        chosen = set(level_round([time for _, time in waiting], replicas))
        taken = [batch for number, (batch, _) in enumerate(waiting) if number in chosen]
        waiting = [item for number, item in enumerate(waiting) if number not in chosen]
        dealt = (dealt or set()).union(batch.number for batch in taken)
        first, fill = (waiting[0][0].number, waiting[0][0].before) if waiting else (following, end)
        dealt = {number for number in dealt if number >= first}
        yield taken, DealState(fill, tuple(sorted(number - first for number in dealt)))


def level_round(times: Sequence[float], replicas: int) -> list[int]:
    """Which of the batches that wait are dealt: the first, and those that leave least time idle.

    `level_round([4, 9, 5, 4, 8, 5], 3)` is [0, 2, 3].
    """
    order = sorted(range(len(times)), key=lambda number: (times[number], number))
    sums = [0.0, *accumulate(times[number] for number in order)]
    at = order.index(0)
    firsts = range(max(0, at - replicas + 1), max(0, min(at, len(order) - replicas)) + 1)

    def idle(first: int) -> float:
        last = min(first + replicas, len(order))
        return replicas * times[order[last - 1]] - (sums[last] - sums[first])

    best = min(firsts, key=idle)
    return sorted(order[best : best + replicas])
