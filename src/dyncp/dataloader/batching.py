"""Batches of an epoch: a function of the samples' order and lengths, the budget and a position.

Ranks compute the same batches without talking. An optimiser step has `accumulation_steps` rounds;
in a round every replica gets one batch:

    batches        b0 b1 | b2 b3 || b4 b5 | b6 b7 || ...      2 replicas, 2 rounds per step
    replica 0      b0      b2       b4      b6
    replica 1         b1      b3       b5      b7
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice

from dyncp.dataloader.config import Budget, LoaderConfig, check_budget
from dyncp.dataloader.dataset import MapSource, Source
from dyncp.dataloader.entry import Entry
from dyncp.dataloader.state import Position

logger = logging.getLogger(__name__)

Fit = Callable[[Entry, int | None], Entry | None]


@dataclass(frozen=True, eq=False)
class Selection:
    """A batch to prepare: its samples, and the position after it.

    `number` counts the replica's batches of the iteration. A *filler* stands in for a batch that a
    replica lacks in the last round: it has no targets, and counts for nothing."""

    number: int
    entries: tuple[Entry, ...]
    end: Position
    filler: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(entry.length for entry in self.entries)

    @cached_property
    def fingerprint(self) -> str:
        """Of what every rank knows about the batch without reading samples."""
        text = repr((self.end.epoch, self.number, [(e.index, e.length) for e in self.entries]))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False)
class SelectedStep:
    """The batches of one optimiser step that one replica still has to train on."""

    number: int
    selections: tuple[Selection, ...]
    known_items: int | None  # targets of the whole step, where the step was begun before resuming

    def after(self, steps: int, batches: int) -> "SelectedStep":
        """The same step, numbered behind so many steps and batches of earlier epochs."""
        selections = tuple(replace(s, number=s.number + batches) for s in self.selections)
        return replace(self, number=self.number + steps, selections=selections)


@dataclass(frozen=True, eq=False)
class GatheredBatch:
    """`read` is what `Position.samples` is after it: samples, or lists of a batch sampler."""

    entries: tuple[Entry, ...]
    read: int
    full: bool = True


class Batching:
    """Cuts an epoch into optimiser steps, for one of `num_replicas` replicas."""

    def __init__(
        self, source: Source, config: LoaderConfig, budget: Budget, replica: int, num_replicas: int
    ) -> None:
        self._source, self._config = source, config
        self._budget, self._replica, self._num_replicas = budget, replica, num_replicas
        self._per_step = config.accumulation_steps * num_replicas

    def steps(self, start: Position) -> Iterator[SelectedStep]:
        """The optimiser steps from a position to the end of the last epoch. Batches and steps are
        numbered on from one epoch to the next."""
        position, steps, batches = start, 0, 0
        for _ in self._epochs(start.epoch):
            for step in self.epoch_steps(position):
                yield step.after(steps, batches)
                position = step.selections[-1].end
            if not position.started:
                return  # an empty dataset
            steps += -(-position.batches // self._per_step)
            batches += self.first_number(position)
            position = self.next_epoch(position)

    def next_epoch(self, position: Position) -> Position:
        """The start of the epoch after that of a position, which has been read to its end."""
        return self._source.start(position.next_epoch(position.epoch + 1))

    def first_number(self, position: Position) -> int:
        """Number of the first batch that a replica gets from a position on."""
        return -(-position.batches // self._num_replicas)

    def epoch_steps(self, start: Position) -> Iterator[SelectedStep]:
        """The optimiser steps from a position to the end of its epoch."""
        batches = self._batches(start)
        if self._config.drop_last:
            batches = _only_full(batches)
        per_step, position = self._per_step, start
        while True:
            wanted = per_step - position.batches % per_step
            group = list(islice(batches, wanted))
            if not group or (len(group) < wanted and self._config.drop_last):
                return
            known = position.items if position.batches % per_step else None
            number = position.batches // per_step
            selections = tuple(self._rounds(group, position))
            yield SelectedStep(number, selections, known)
            position = selections[-1].end

    def num_batches(self, start: Position) -> int:
        """Batches that each replica gets from a position to the end of its epoch."""
        return sum(len(step.selections) for step in self.epoch_steps(start))

    def num_rounds(self, batches: int) -> int:
        """Batches that each replica gets when there are so many for all of them."""
        steps, left = divmod(batches, self._per_step)
        full = steps * self._config.accumulation_steps
        return full if self._config.drop_last else full + -(-left // self._num_replicas)

    def _epochs(self, first: int) -> Iterable[int]:
        last = self._config.epochs
        if last is None:
            return count(first)
        if last == 1:  # whoever loops over epochs says which
            return [first]
        if first >= last:
            logger.warning("all %d epochs are done; set_epoch begins one of them again", last)
        return range(first, last)

    def _rounds(self, group: list[GatheredBatch], start: Position) -> Iterator[Selection]:
        replicas = self._num_replicas
        for first in range(0, len(group), replicas):
            batches = group[first : first + replicas]
            done = first + len(batches)
            last = batches[-1].entries[-1]
            end = replace(
                start,
                samples=batches[-1].read,
                batches=start.batches + done,
                total=start.total + done,
                items=None,
                dataset_state=last.dataset_state,
            )
            number = (start.batches + first) // replicas
            if self._replica < len(batches):
                yield Selection(number, batches[self._replica].entries, end)
            else:
                shortest = min(batches[0].entries, key=lambda entry: entry.length)
                yield Selection(number, (shortest,), end, filler=True)

    def _batches(self, start: Position) -> Iterator[GatheredBatch]:
        if self._config.batch_sampler is not None:
            assert isinstance(self._source, MapSource)
            return self._sampled(self._source, start)
        entries = self._source.entries(start)
        return gather_batches(entries, self._budget_of, self._fit, start.total)

    def _sampled(self, source: MapSource, start: Position) -> Iterator[GatheredBatch]:
        for read, listed in enumerate(source.lists(start), start.samples + 1):
            fitted = (self._fit(entry, None) for entry in listed)
            entries = tuple(entry for entry in fitted if entry is not None)
            if entries:
                yield GatheredBatch(entries, read)

    def _budget_of(self, number: int) -> int:
        if callable(self._budget):
            return check_budget(self._budget(number), number)
        return self._budget

    def _fit(self, entry: Entry, budget: int | None) -> Entry | None:
        """The entry, cut or dropped (None) by the policy if it is longer than allowed."""
        most = min(n for n in (self._config.max_length, budget, entry.length) if n is not None)
        if entry.length <= most:
            return entry
        if self._config.too_long == "truncate":
            return replace(entry, length=most)
        if self._config.too_long == "drop":
            logger.debug("sample %d is dropped: %d tokens", entry.index, entry.length)
            return None
        what = "max_length" if most == self._config.max_length else "tokens_per_batch"
        raise ValueError(
            f"sample {entry.index} has {entry.length} tokens, more than {what}={most}; raise it, "
            "shorten the sample, or choose too_long='truncate' or 'drop'"
        )


def gather_batches(
    entries: Iterable[Entry], budget: Callable[[int], int], fit: Fit, number: int = 0
) -> Iterator[GatheredBatch]:
    """Consecutive samples of at most `budget(number)` tokens together, number after number."""
    batch: list[Entry] = []
    used = 0
    for entry in entries:
        limited = fit(entry, None)
        if limited is None:
            continue
        crowded = bool(batch) and used + limited.length > budget(number)
        fitted = fit(entry, budget(number + crowded))  # the next budget may be another one
        if fitted is None:
            continue
        if crowded:
            yield GatheredBatch(tuple(batch), batch[-1].place + 1)
            batch, used, number = [], 0, number + 1
        batch.append(fitted)
        used += fitted.length
    if batch:
        yield GatheredBatch(tuple(batch), batch[-1].place + 1, used == budget(number))


def _only_full(batches: Iterator[GatheredBatch]) -> Iterator[GatheredBatch]:
    return (batch for batch in batches if batch.full)
