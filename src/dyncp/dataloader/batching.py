"""Divides an epoch into batches, which depend only on the order and lengths of the samples, the
token budget and the position. So all ranks compute the same batches without communication.

A batch starts with the oldest waiting sample, so that no sample waits forever. It is filled with
the subset of the next samples that comes closest to the token budget (an exact subset sum). The
reachable sums are the bits of an integer; a sample of n tokens adds the same bits shifted by n.
With 7 tokens left and samples of 4, 2, 5:

    sums       bits        with 4        with 2            with 5
    0          00000001    00010001      01010101          11110101      7 = 2 + 5

The search ends as soon as the batch is full enough, so samples stay close to their order.

Then batches are dealt to the replicas. An optimiser step has `accumulation_steps` rounds; in each
round, every replica gets one batch:

    batches        b0 b3 | b1 b2 || b4 b6 | b5 b7 || ...      2 replicas, 2 rounds per step
    replica 0      b0      b1       b4      b5
    replica 1         b3      b2       b6      b7

A round consists of the oldest waiting batch and the batches of the window that, together with it,
leave the replicas idle for the shortest time. With 3 replicas and predicted seconds

    waiting, oldest first    4 9 5 4 8 5        sorted by time    4 4 5 5 8 9

the rounds are 4 4 5, then 9 8 5. The batches themselves do not depend on the number of replicas."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, count, islice

from dyncp.dataloader.options import Budget, LoaderConfig, budget_of
from dyncp.dataloader.state import Position
from dyncp.samples.fields import digest_of, skip_reason
from dyncp.samples.source import IndexedSource, SampleEntry, SampleSource

logger = logging.getLogger(__name__)

Seconds = Callable[[int], float]  # predicted time of a sample, by its number of tokens
# A batch is full enough when at most 1/200 of its budget is left.
FULL_SHARE = 200
# Samples of at most 1/16 of the remaining room are taken in order: room for others is left anyway.
SHORT_SHARE = 16
# The subset sum has at most this many distinct sums; larger rooms are measured in coarser units.
MOST_SUMS = 1 << 17
SHOWN = 4  # samples that the description of a batch lists
Skip = Callable[[str, int, object], None]
Fit = Callable[[SampleEntry, int | None], list[SampleEntry]]


@dataclass(frozen=True, eq=False)
class FilledBatch:
    """A batch of samples. `after` is the position after it, without how batches are dealt. Only the
    last batch of an epoch may be not `full`."""

    number: int
    entries: tuple[SampleEntry, ...]
    after: Position
    full: bool = True


Round = tuple[list[FilledBatch], Position]  # one batch per replica; the position after them


def fill_batches(
    entries: Iterable[SampleEntry],
    budget: Callable[[int], int],
    fit: Fit,
    window: int,
    start: Position,
    number: int,
) -> Iterator[FilledBatch]:
    """Yields batches of at most `budget(number)` tokens, numbered from `number` on.

    `entries` are the samples from position `start` on. A batch is chosen from the next samples,
    `window` times its budget; with a window of 1 it takes samples in order, up to the first that
    does not fit. `fit(entry, limit)` returns the pieces to use of a sample: the sample itself if it
    is within the limit, otherwise shorter pieces or none.
    """
    filling = _Filling(entries, fit, start)
    while not filling.at_end() and filling.open(budget(number)):
        chosen = filling.take(budget(number), window)
        used = sum(entry.length for entry in chosen)
        full = used == budget(number) or not filling.at_end()
        yield FilledBatch(number, chosen, filling.position(), full)
        number += 1


def best_subset(lengths: Iterable[int], room: int, enough: int) -> list[int]:
    """Indices of the lengths whose sum comes closest to `room` without exceeding it. Reads no more
    lengths than it needs for a sum of `enough`.

    `best_subset([4, 2, 5], 7, 7)` is [1, 2].
    """
    unit = -(-room // MOST_SUMS)
    room, enough = room // unit, -(-enough // unit)
    sums, all_sums = 1, (1 << room + 1) - 1
    taken: list[int] = []
    before: list[int] = []  # for each sample, the sums that the samples before it can reach
    for length in lengths:
        taken.append(-(-length // unit))
        before.append(sums)
        if taken[-1] <= room:
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
    """The samples that wait for a batch, in order; further samples are read when needed."""

    def __init__(self, entries: Iterable[SampleEntry], fit: Fit, start: Position) -> None:
        self._entries, self._fit = iter(entries), fit
        self._waiting: list[SampleEntry] = []
        self._taken = set(start.taken)
        self._start = start
        self._next, self._dataset_state = start.samples, start.dataset_state  # of the next to read

    def open(self, budget: int) -> bool:
        """Makes the oldest waiting sample fit the budget; returns False if no sample is left."""
        while (oldest := self._at(0)) is not None:
            fitted = self._fit(oldest, budget)
            if fitted:
                self._waiting[0] = fitted[0]
                return True
            self._remove([0])
        return False

    def take(self, budget: int, window: int) -> tuple[SampleEntry, ...]:
        """Removes and returns the samples of the next batch, starting with the oldest."""
        first, room = self._in_order(budget, share=1)
        chosen = list(range(first))
        if window > 1 and room * FULL_SHARE > budget and self._at(first) is not None:
            first, room = self._in_order(budget, share=SHORT_SHARE)
            lengths = self._lengths(first, (window - 1) * budget + room)
            best = best_subset(lengths, room, room - budget // FULL_SHARE)
            chosen = [*range(first), *(first + number for number in best)]
        entries = tuple(self._waiting[number] for number in chosen)
        self._remove(chosen)
        return entries

    def at_end(self) -> bool:
        return self._at(0) is None

    def position(self) -> Position:
        """The position of the oldest waiting sample. Reads no sample."""
        number, state = self._next, self._dataset_state
        if self._waiting:
            number, state = self._waiting[0].number, self._waiting[0].state_before
        self._taken = {key for key in self._taken if key[0] >= number}
        taken = tuple(sorted(self._taken))
        return replace(self._start, samples=number, taken=taken, dataset_state=state)

    def _at(self, number: int) -> SampleEntry | None:
        """Waiting sample `number`; None if the epoch has no more samples."""
        while number >= len(self._waiting):
            if not self._read():
                return None
        return self._waiting[number]

    def _in_order(self, budget: int, share: int) -> tuple[int, int]:
        """The number of samples to take in order, and the room after them. The first is always
        taken; each other one must need at most 1 / `share` of the remaining room."""
        room, number = budget - self._waiting[0].length, 1
        while (sample := self._at(number)) is not None and sample.length <= room // share:
            room -= sample.length
            number += 1
        return number, room

    def _lengths(self, number: int, tokens: int) -> Iterator[int]:
        """Lengths of the waiting samples from `number` on that cover the next `tokens` tokens."""
        while tokens > 0 and (sample := self._at(number)) is not None:
            yield sample.length
            tokens -= sample.length
            number += 1

    def _remove(self, numbers: Sequence[int]) -> None:
        self._taken.update(self._waiting[number].piece for number in numbers)
        gone = set(numbers)
        self._waiting = [w for number, w in enumerate(self._waiting) if number not in gone]

    def _read(self) -> bool:
        """Reads the next sample; returns False at the end of the epoch."""
        entry = next(self._entries, None)
        if entry is None:
            return False
        pieces = self._fit(replace(entry, state_before=self._dataset_state), None)
        self._next, self._dataset_state = entry.number + 1, entry.dataset_state
        self._waiting += [piece for piece in pieces if piece.piece not in self._taken]
        return True


def deal_rounds(
    batches: Iterator[FilledBatch],
    first: int,
    replicas: int,
    window: int,
    seconds: Seconds,
    start: Position,
) -> Iterator[Round]:
    """Yields rounds of one batch per replica (the last round may have fewer). The position after a
    round is that before the oldest waiting batch; its `dealt` lists the later batches that have
    been dealt already.

    A round is chosen from the next `window` × `replicas` batches, by the `seconds` of their
    samples. `batches` start at position `start` with number `first`.
    """
    most = window * replicas if replicas > 1 else 1
    waiting: list[tuple[FilledBatch, Position, float]] = []  # batch, position before it, seconds
    dealt = {first + offset for offset in start.dealt}  # numbers after the oldest waiting batch
    end, following = start, first  # position after the last batch read; number of the next batch
    while True:
        while len(waiting) < most and (batch := next(batches, None)) is not None:
            if batch.number not in dealt:
                times = (seconds(entry.length) for entry in batch.entries)
                waiting.append((batch, end, sum(times) if replicas > 1 else 0.0))
            end, following = batch.after, batch.number + 1
        if not waiting:
            return
        chosen = set(balanced_round([time for *_, time in waiting], replicas))
        taken = [batch for number, (batch, *_) in enumerate(waiting) if number in chosen]
        waiting = [item for number, item in enumerate(waiting) if number not in chosen]
        oldest, before = (waiting[0][0].number, waiting[0][1]) if waiting else (following, end)
        dealt = {n for n in dealt.union(batch.number for batch in taken) if n >= oldest}
        yield taken, replace(before, dealt=tuple(sorted(number - oldest for number in dealt)))


def balanced_round(times: Sequence[float], replicas: int) -> list[int]:
    """Indices of the batches to deal, given the predicted times of all waiting batches: the first,
    and the batches that together with it leave the replicas idle for the shortest time.

    `balanced_round([4, 9, 5, 4, 8, 5], 3)` is [0, 2, 3].
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


@dataclass(frozen=True, eq=False)
class SelectedBatch:
    """A batch to prepare: its samples, and the position after it.

    `number` counts the replica's batches of the iteration. If the last round has no batch left for
    this replica, it gets a *filler*: one short sample of another replica, without targets."""

    number: int
    entries: tuple[SampleEntry, ...]
    end: Position
    filler: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(entry.length for entry in self.entries)

    def __str__(self) -> str:
        indices = ", ".join(str(entry.index) for entry in self.entries[:SHOWN])
        more = ", ..." if len(self.entries) > SHOWN else ""
        return f"{self.num_tokens} tokens of samples {indices}{more}"

    @cached_property
    def fingerprint(self) -> str:
        """Digest of what all ranks know of the batch without reading samples."""
        return digest_of((self.end.epoch, self.number, _contents(self.entries)), size=16)


@dataclass(frozen=True, eq=False)
class SelectedUpdate:
    """One replica's batches of one optimiser step (in code *update*: a step is a prepared plan's
    handle); after resuming within an update, the rest of it."""

    number: int
    selections: tuple[SelectedBatch, ...]
    known_items: int | None  # targets of the whole update if the state was saved within it
    fingerprint: str = ""  # digest of the batches of all replicas


class BatchSelector:
    """Divides an epoch into optimiser steps, for one of `num_replicas` replicas. `budget` is None
    if a batch sampler makes the batches. `seconds` predicts the time of a sample from its number of
    tokens (default: proportional to it). `skip(reason, index, text)` is called for every sample
    that is dropped."""

    def __init__(
        self,
        source: SampleSource,
        config: LoaderConfig,
        budget: Budget | None,
        replica: int,
        num_replicas: int,
        seconds: Seconds = float,
        skip: Skip = lambda *_: None,
    ) -> None:
        self._skip = skip
        self._source, self._config, self._seconds = source, config, seconds
        self._budget, self._replica, self._num_replicas = budget, replica, num_replicas
        self._per_update = config.accumulation_steps * num_replicas

    def first_number(self, position: Position) -> int:
        """Number of the first batch that a replica gets after a position of the same epoch."""
        return -(-position.batches // self._num_replicas)

    def updates(self, start: Position) -> Iterator[SelectedUpdate]:
        """Yields the optimiser steps from a position to the end of its epoch."""
        rounds = self.rounds(start)
        per_update, position = self._per_update, start
        numbers, batches = count(start.batches // per_update), count(self.first_number(start))
        while True:
            wanted = per_update - position.batches % per_update
            group = list(islice(rounds, wanted // self._num_replicas))
            found = sum(len(dealt) for dealt, _ in group)
            if not group or (found < wanted and self._config.drop_last):
                return
            known = position.items if position.batches % per_update else None
            selections = tuple(self._own(group, position, batches))
            contents = [_contents(batch.entries) for dealt, _ in group for batch in dealt]
            fingerprint = digest_of((position.epoch, contents), size=16)
            yield SelectedUpdate(next(numbers), selections, known, fingerprint)
            position = selections[-1].end

    def num_batches(self, start: Position) -> int:
        """Number of batches that each replica gets from a position to the end of its epoch."""
        return sum(len(update.selections) for update in self.updates(start))

    def num_rounds(self, batches: int) -> int:
        """Number of batches that each replica gets if all replicas together get `batches`."""
        steps, left = divmod(batches, self._per_update)
        full = steps * self._config.accumulation_steps
        return full if self._config.drop_last else full + -(-left // self._num_replicas)

    def _own(
        self, rounds: list[Round], start: Position, numbers: Iterator[int]
    ) -> Iterator[SelectedBatch]:
        """This replica's batches of these rounds, which start at a position."""
        done = 0
        for (batches, after), number in zip(rounds, numbers, strict=False):
            done += len(batches)
            now, total = start.batches + done, start.total + done
            end = replace(after, batches=now, total=total, items=None)
            if self._replica < len(batches):
                yield SelectedBatch(number, batches[self._replica].entries, end)
            else:
                shortest = min(batches[0].entries, key=lambda entry: entry.length)
                yield SelectedBatch(number, (shortest,), end, filler=True)

    def rounds(self, start: Position) -> Iterator[Round]:
        """Yields rounds: the batches that the replicas train on at the same time."""
        fill, deal = self._config.windows(knows_lengths=self._source.knows_lengths)
        first = start.total - len(start.dealt)
        if self._budget is None:
            assert isinstance(self._source, IndexedSource)
            batches, deal = self._sampled(self._source, start), 1
        else:
            entries, budget = self._source.entries(start), partial(budget_of, self._budget)
            batches = fill_batches(entries, budget, self._fit, fill, start, first)
        if self._config.drop_last:
            batches = (batch for batch in batches if batch.full)
        return deal_rounds(batches, first, self._num_replicas, deal, self._seconds, start)

    def _sampled(self, source: IndexedSource, start: Position) -> Iterator[FilledBatch]:
        """The batches of a batch sampler; lists that become empty are left out."""
        after = replace(start, taken=())
        for read, listed in enumerate(source.batch_lists(start), start.samples):
            entries = tuple(piece for entry in listed for piece in self._fit(entry, None))
            state = listed[-1].dataset_state if listed else after.dataset_state
            after = replace(after, samples=read + 1, dataset_state=state)
            if entries:
                yield FilledBatch(read, entries, after)

    def _fit(self, entry: SampleEntry, budget: int | None) -> list[SampleEntry]:
        """The entry itself, or its pieces by the option `too_long` if it is too long for a batch of
        this budget (None: for every batch). An empty list drops the sample."""
        limits = (self._config.max_length, self._budget if budget is None else budget)
        most = min([n for n in limits if isinstance(n, int)], default=entry.length)
        if not entry.length:
            self._skip(skip_reason(entry.sample), entry.index, entry.sample or "no tokens")
            return []
        if entry.length <= most:
            return [entry]
        if self._config.too_long == "truncate":
            return [replace(entry, length=most)]
        what = "max_length" if most == self._config.max_length else "tokens_per_batch"
        found = f"{entry.length} tokens, more than {what}={most}"
        if self._config.too_long == "drop":
            self._skip("too_long", entry.index, found)
            return []
        if self._config.too_long == "split" and budget is None:
            starts = range(0, entry.length, most)
            return [replace(entry, start=s, length=min(most, entry.length - s)) for s in starts]
        if self._config.too_long == "split":
            hint = "set max_length to the smallest budget, so that no piece is longer"
        else:
            hint = "shorten the sample, or choose too_long='truncate', 'drop' or 'split'"
        raise ValueError(f"sample {entry.index} has {found}; raise it, {hint}")


def _contents(entries: Iterable[SampleEntry]) -> list[tuple[int, int, int]]:
    return [(entry.index, entry.start, entry.length) for entry in entries]
