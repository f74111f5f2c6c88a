"""How batches are filled: with those samples of a window that come closest to the token budget.

The oldest sample opens a batch, so that none waits for ever. The others are the subset of the next
samples that fills it best (an exact subset sum): the possible sums are the bits of an integer, and
a sample of n tokens adds all of them shifted by n. With 7 tokens left and samples of 4, 2, 5:

    sums       bits        with 4        with 2            with 5
    0          00000001    00010001      01010101          11110101      7 = 2 + 5

The search ends as soon as a batch is full enough, so that samples stay close to their order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dyncp.dataloader.dataset import SampleEntry

# A batch is full enough when at most a 200th of its budget is left.
FULL_SHARE = 200
# Samples of at most a 16th of the room that is left are taken in order: they leave choices open.
SHORT_SHARE = 16
# Sums are computed in units of a 131,072nd of the room.
MOST_SUMS = 1 << 17

PieceKey = tuple[int, int]  # a sample's place in the epoch, and where its tokens begin (pieces)
Fit = Callable[[SampleEntry, int | None], list[SampleEntry]]


@dataclass(frozen=True)
class FillState:
    """Between two batches: all samples before place `samples` are in batches, and `taken` of those
    from there on. `dataset_state` is the source's state at that place."""

    samples: int = 0
    taken: tuple[PieceKey, ...] = ()
    dataset_state: Any = None


@dataclass(frozen=True, eq=False)
class FilledBatch:
    """Batch `number` of the epoch, and the states before and after it. Only the last batch of an
    epoch is not `full`."""

    number: int
    entries: tuple[SampleEntry, ...]
    before: FillState
    after: FillState
    full: bool = True


@dataclass(frozen=True, eq=False)
class _WaitingSample:
    entry: SampleEntry
    dataset_state: Any  # before the sample

    @property
    def key(self) -> PieceKey:
        return self.entry.place, self.entry.start


def fill_batches(
    entries: Iterable[SampleEntry],
    budget: Callable[[int], int],
    fit: Fit,
    window: int,
    start: FillState | None = None,
    number: int = 0,
) -> Iterator[FilledBatch]:
    """Batches of at most `budget(number)` tokens, number after number.

    `entries` begin at the place of `start`. A batch is chosen among the next samples of `window`
    times its budget; with a window of 1 it takes samples in order, up to the first that does not
    fit. `fit(entry, limit)` returns what is left of a sample that is longer than the limit.
    """
    filling = _Filling(entries, fit, start or FillState())
    while not filling.at_end() and filling.open(budget(number)):
        before = filling.state()
        chosen, used = filling.take(budget(number), window)
        full = used == budget(number) or not filling.at_end()
        yield FilledBatch(number, chosen, before, filling.state(), full)
        number += 1


def best_subset(lengths: Iterable[int], room: int, enough: int) -> list[int]:
    """Which of these fill `room` best, looking no further than needed to fill `enough` of it.

    `best_subset([4, 2, 5], 7, 7)` is [1, 2].
    """
    unit = -(-room // MOST_SUMS)
    room, enough = room // unit, -(-enough // unit)
    sums, all_sums = 1, (1 << room + 1) - 1
    taken: list[int] = []
    before: list[int] = []  # the sums without each sample and those after it
    for length in lengths:
        taken.append(-(-length // unit))
        before.append(sums)
        sums |= (sums << taken[-1]) & all_sums
        if sums.bit_length() > enough:
            break
    left = sums.bit_length() - 1
    chosen = []
    for number in reversed(range(len(before))):
        if not before[number] >> left & 1:
            chosen.append(number)
            left -= taken[number]
    return chosen[::-1]


class _Filling:
    """The samples that wait for a batch, in order; more are read when they are needed."""

    def __init__(self, entries: Iterable[SampleEntry], fit: Fit, start: FillState) -> None:
        self._entries, self._fit = iter(entries), fit
        self._waiting: list[_WaitingSample] = []
        self._taken = set(start.taken)
        self._end = start  # after what was read

    def open(self, budget: int) -> bool:
        """Makes the oldest waiting sample fit the budget; False if none is left."""
        while (oldest := self._at(0)) is not None:
            fitted = self._fit(oldest.entry, budget)
            if fitted:
                self._waiting[0] = _WaitingSample(fitted[0], oldest.dataset_state)
                return True
            self._remove([0])
        return False

    def take(self, budget: int, window: int) -> tuple[tuple[SampleEntry, ...], int]:
        """The samples of a batch that the oldest opens, and their tokens."""
        first, room = self._in_order(budget, share=1)
        chosen = list(range(first))
        if window > 1 and room * FULL_SHARE > budget and self._at(first) is not None:
            first, room = self._in_order(budget, share=SHORT_SHARE)
            tokens = (window - 1) * budget + room
            numbers, lengths = self._fitting(first, room, tokens)
            best = best_subset(lengths, room, room - budget // FULL_SHARE)
            chosen = [*range(first), *(numbers[number] for number in best)]
        entries = tuple(self._waiting[number].entry for number in chosen)
        self._remove(chosen)
        return entries, sum(entry.length for entry in entries)

    def at_end(self) -> bool:
        return self._at(0) is None

    def state(self) -> FillState:
        """Reads nothing."""
        if not self._waiting:
            return self._end
        oldest = self._waiting[0]
        place = oldest.entry.place
        self._taken = {key for key in self._taken if key[0] >= place}
        return FillState(place, tuple(sorted(self._taken)), oldest.dataset_state)

    def _at(self, number: int) -> _WaitingSample | None:
        """Waiting sample `number`; None if there are no more."""
        while number >= len(self._waiting):
            if not self._read():
                return None
        return self._waiting[number]

    def _in_order(self, budget: int, share: int) -> tuple[int, int]:
        """How many samples are taken in order, each at most 1 / `share` of the room that is left
        (the first in any case), and the room after them."""
        room, number = budget - self._waiting[0].entry.length, 1
        while (sample := self._at(number)) is not None and sample.entry.length <= room // share:
            room -= sample.entry.length
            number += 1
        return number, room

    def _fitting(self, number: int, room: int, tokens: int) -> tuple[list[int], Iterator[int]]:
        """Waiting samples that fit the room, among those of the next `tokens` tokens from `number`
        on: their numbers (so far), and their lengths, read lazily."""
        numbers: list[int] = []

        def lengths() -> Iterator[int]:
            at, left = number, tokens
            while left > 0 and (sample := self._at(at)) is not None:
                if sample.entry.length <= room:
                    numbers.append(at)
                    yield sample.entry.length
                left -= sample.entry.length
                at += 1

        return numbers, lengths()

    def _remove(self, numbers: Sequence[int]) -> None:
        self._taken.update(self._waiting[number].key for number in numbers)
        gone = set(numbers)
        self._waiting = [w for number, w in enumerate(self._waiting) if number not in gone]

    def _read(self) -> bool:
        """Reads the next sample; False if there is none."""
        entry = next(self._entries, None)
        if entry is None:
            return False
        before, self._end = self._end, FillState(entry.place + 1, (), entry.dataset_state)
        pieces = [_WaitingSample(piece, before.dataset_state) for piece in self._fit(entry, None)]
        self._waiting += [piece for piece in pieces if piece.key not in self._taken]
        return True
