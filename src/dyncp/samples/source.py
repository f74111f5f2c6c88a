"""Yields the samples of a dataset in the order of an epoch, from any position on: by index
(`IndexedSource`: lists, torch and Hugging Face datasets) or by iteration (`StreamSource`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import IterableDataset

from dyncp.arrays import Int64
from dyncp.samples.checks import SampleChecks, SampleLimits
from dyncp.samples.fields import SampleError, digest_of, read_sample, sample_bytes
from dyncp.samples.order import (
    SamplePosition,
    SamplerOrder,
    check_repeatable,
    repeat_from,
    set_epoch,
)
from dyncp.samples.reading import Reader, SeededRandom

Place = TypeVar("Place", bound=SamplePosition)
MaskDigest = Callable[[Any, int], str]  # digest of the masks of a sample, given its index


@dataclass(frozen=True, eq=False)
class SampleOptions:
    """The options of a loader that concern its samples."""

    lengths: Any = None
    shuffle: bool = False
    seed: int = 0
    order: Iterable[Any] | None = None  # a sampler, or a batch sampler
    bad_samples: str = "error"
    token_fields: Mapping[str, int] = field(default_factory=dict)
    num_workers: int = 0
    limits: SampleLimits = field(default_factory=SampleLimits)


@dataclass(frozen=True, eq=False)
class SampleEntry:
    """A sample of an epoch: its `number` in the epoch's order, its `index` in the dataset, and its
    `length` in tokens. An entry may be a piece of a sample of `whole` tokens: the `length` tokens
    from `start` on.

    `sample` is set if it had to be read to learn its length; if the length is 0, it is the reason
    why the sample is dropped. `state_before` and `dataset_state` are the states from which the
    source continues with this sample, and after it."""

    number: int
    index: int
    length: int
    sample: Any = None
    dataset_state: Any = None
    epoch: int = 0
    whole: int = 0
    start: int = 0
    state_before: Any = None

    @property
    def piece(self) -> tuple[int, int]:
        """Identifies a piece within the epoch: the number of its sample and its first token."""
        return self.number, self.start


class SampleSource(ABC):
    """The samples of a dataset in the order of an epoch. The default methods are those of a stream,
    of which nothing is known before it is read."""

    checks: SampleChecks
    num_samples: int | None = None  # None: unknown
    knows_lengths = False  # whether lengths are known without reading samples

    @abstractmethod
    def entries(self, position: SamplePosition) -> Iterator[SampleEntry]:
        """Yields the samples from a position on, not cut yet."""

    def read(self, entry: SampleEntry) -> Any:
        """The whole sample of an entry, without its padding."""
        return entry.sample

    def start(self, position: Place) -> Place:
        """The same position; at the start of an epoch, with the state of the sampler."""
        return position

    def rewind(self, position: Place) -> Place:
        """The start of the position's epoch."""
        return position.next_epoch(position.epoch)

    def by_lengths(self) -> "IndexedSource | None":
        """A source with the same samples that reads none of them, or None if not all lengths are
        known."""
        return None

    def identity(self, mask_digest: MaskDigest | None = None) -> dict[str, str]:  # noqa: ARG002
        """Names and digests that are equal for equal datasets; with `mask_digest`, also of the
        masks of a few samples."""
        return {}

    def read_ahead(self, entries: Iterable[SampleEntry]) -> None:  # noqa: B027
        """Announces samples that will be read soon."""

    def open(self) -> None:  # noqa: B027
        """Starts reading workers."""

    def close(self) -> None:  # noqa: B027
        """Ends reading workers."""


def open_source(dataset: Any, options: SampleOptions) -> SampleSource:
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if indexed and not isinstance(dataset, IterableDataset):
        return IndexedSource(dataset, options)
    for name, given in (
        ("shuffle=True", options.shuffle),
        ("a sampler", options.order is not None),
        ("lengths=", options.lengths is not None),
        ("num_workers=", options.num_workers > 0),
    ):
        if given:
            raise ValueError(
                f"{name} needs a dataset with __len__ and __getitem__; "
                f"{type(dataset).__name__} can only be iterated"
            )
    return StreamSource(dataset, options)


class IndexedSource(SampleSource):
    """A dataset with `__len__` and `__getitem__`. If lengths are given, samples are not read to
    learn their lengths."""

    num_samples: int

    def __init__(self, dataset: Any, options: SampleOptions) -> None:
        self._dataset, self._options = dataset, options
        self.checks = SampleChecks(options.limits)
        self._how = options.bad_samples, options.token_fields, self.checks
        self.num_samples = len(dataset)
        least = 0 if options.bad_samples == "drop_empty" else 1
        given = options.lengths
        self._lengths = None if given is None else find_lengths(dataset, given, least)
        self.knows_lengths = self._lengths is not None
        self._found = np.full(len(dataset), -1, np.int64)  # lengths of the samples read so far
        self._reader = Reader(dataset, options.num_workers, options.seed)
        self._sampler = None if options.order is None else SamplerOrder(options.order, options.seed)

    def start(self, position: Place) -> Place:
        if self._sampler is None or position.dataset_state is not None:
            return position
        return replace(position, dataset_state=self._sampler.start())

    def rewind(self, position: Place) -> Place:
        start, state = position.next_epoch(position.epoch), position.dataset_state
        return replace(start, dataset_state=state and {"generators": state["generators"]})

    def undisturbed(self) -> AbstractContextManager[None]:
        """Inside this context, iterating over the order does not change the sampler's state."""
        return nullcontext() if self._sampler is None else self._sampler.undisturbed()

    def entries(self, position: SamplePosition) -> Iterator[SampleEntry]:
        return self._entries_of(self._order(position), position.epoch, position.samples)

    def batch_lists(self, position: SamplePosition) -> Iterator[list[SampleEntry]]:
        """Yields the entries of each list that the batch sampler yields."""
        assert self._sampler is not None
        for indices, state in self._sampler.items(self.start(position)):
            listed = ((int(index), state) for index in indices)
            yield list(self._entries_of(listed, position.epoch, 0))

    def read(self, entry: SampleEntry) -> Any:
        if entry.sample is not None:
            return entry.sample
        length, sample = self._read(entry.epoch, entry.index)
        if length != entry.whole:
            raise ValueError(
                f"sample {entry.index} has {length} tokens; lengths= says {entry.whole}"
            )
        return sample

    def read_ahead(self, entries: Iterable[SampleEntry]) -> None:
        self._reader.ahead((e.epoch, e.index) for e in entries if e.sample is None)

    def open(self) -> None:
        self._reader.start()

    def close(self) -> None:
        self._reader.close()

    def by_lengths(self) -> "IndexedSource | None":
        if self.knows_lengths:
            return self
        lengths = self._found if (self._found >= 0).all() else _lengths_in_memory(self._dataset)
        if lengths is None:
            return None
        counting = copy(self)  # `knows_lengths` stays False, so that the windows are the same
        counting._lengths = lengths
        return counting

    def identity(self, mask_digest: MaskDigest | None = None) -> dict[str, str]:
        identity = {"number of samples": str(self.num_samples)}
        if self._lengths is not None:
            identity["lengths"] = digest_of(self._lengths.tobytes())
        for index, sample in self._probes.items():
            identity[f"sample {index}"] = self._digest(sample, index)
            if mask_digest is not None and sample is not None:
                identity[f"masks of sample {index}"] = mask_digest(sample, index)
        return identity

    @cached_property
    def _probes(self) -> dict[int, Any]:
        """The first, middle and last sample by index; None if a sample cannot be read."""
        last = self.num_samples - 1
        probes = {i: self._probe(i) for i in sorted({0, last // 2, last}) if i >= 0}
        for index, sample in probes.items():
            if self._sampler is None and isinstance(sample, Mapping):
                self.checks.compare_labels(sample, index)
        return probes

    def _read(self, epoch: int, index: int) -> tuple[int, Any]:
        return read_sample(partial(self._reader.read, (epoch, index)), index, *self._how)

    def _probe(self, index: int) -> Any:
        try:
            return self._reader.read_here((0, index))
        except SampleError:  # the sampler may skip this sample; otherwise training gets the error
            return None

    def _digest(self, sample: Any, index: int) -> str:
        try:
            return digest_of(sample_bytes(sample, index, self._options.token_fields))
        except ValueError:
            return "not readable"

    def _entries_of(
        self, order: Iterator[tuple[int, Any]], epoch: int, first: int
    ) -> Iterator[SampleEntry]:
        """Yields entries for (index, state after it); numbers start at `first`."""
        if self._lengths is None:
            order = self._reader.in_order(order, epoch)
        for number, (given, state) in enumerate(order, first):
            index, sample = int(given), None
            if self._lengths is None:
                length, sample = self._read(epoch, index)
                self._found[index] = length
            else:
                length = int(self._lengths[index])
            yield SampleEntry(number, index, length, sample, state, epoch, length)

    def _order(self, position: SamplePosition) -> Iterator[tuple[int, Any]]:
        if self._sampler is not None:
            return self._sampler.items(self.start(position))
        indices: Iterable[int] = range(self.num_samples)
        if self._options.shuffle:
            rng = np.random.default_rng((self._options.seed, position.epoch))
            indices = rng.permutation(self.num_samples).tolist()
        return ((index, None) for index in islice(indices, position.samples, None))


def find_lengths(dataset: Any, lengths: Any, least: int = 1) -> Int64:
    """The number of tokens of each sample, from an array or from a column of the dataset."""
    if isinstance(lengths, str):
        lengths = _column(dataset, lengths)
    array = np.asarray(lengths)
    if array.shape != (len(dataset),) or array.dtype.kind not in "iu":
        raise ValueError(
            f"lengths is {array.dtype} of shape {array.shape}; expected one integer for each of "
            f"the dataset's {len(dataset)} samples"
        )
    if len(array) and array.min() < least:
        at = int(array.argmin())
        hint = "" if array[at] else ", or bad_samples='drop_empty'"
        raise ValueError(
            f"lengths says {array[at]} tokens for sample {at}; must be at least {least}{hint}"
        )
    return array.astype(np.int64)


def _lengths_in_memory(dataset: Any) -> Int64 | None:
    """The number of tokens of each sample of a list; None unless all are plain dicts in memory."""
    if not isinstance(dataset, list | tuple):
        return None
    lengths = [_plain_length(sample) for sample in dataset]
    return None if None in lengths else np.array(lengths, np.int64)


def _plain_length(sample: Any) -> int | None:
    """Number of tokens of a sample; None if it is not a mapping, or marks tokens as padding."""
    if not isinstance(sample, Mapping) or "padding_mask" in sample:
        return None
    tokens, mask = sample.get("input_ids"), sample.get("attention_mask")
    if not isinstance(tokens, Sized):
        return None
    plain = mask is None or np.array_equal(mask, np.ones(len(tokens)))  # tokenizers give ones
    return len(tokens) if plain else None


def _column(dataset: Any, name: str) -> Any:
    columns = getattr(dataset, "column_names", None)
    if columns is not None:  # Hugging Face
        if name not in columns:
            raise ValueError(f"lengths is {name!r}; the dataset's columns are {', '.join(columns)}")
        return list(dataset[name])
    if isinstance(dataset, Sequence):
        missing = next((i for i, sample in enumerate(dataset) if name not in sample), None)
        if missing is not None:
            raise ValueError(f"lengths is {name!r}, but sample {missing} has no such field")
        return [sample[name] for sample in dataset]
    raise ValueError(
        f"lengths is {name!r}, but {type(dataset).__name__} has no columns; pass an array of "
        "lengths instead"
    )


class StreamSource(SampleSource):
    """A dataset that can only be iterated; every rank reads all of it.

    A dataset with `state_dict` resumes from its own state, unless that state is known to be
    incomplete. Others resume by reading the same samples again, which is checked."""

    def __init__(self, dataset: Any, options: SampleOptions) -> None:
        self._dataset, self._options = dataset, options
        self.checks = SampleChecks(options.limits)
        self._how = options.bad_samples, options.token_fields, self.checks
        self._stateful = _has_exact_state(dataset)
        self._first_state = dataset.state_dict() if self._stateful else None
        self._begun = False

    def entries(self, position: SamplePosition) -> Iterator[SampleEntry]:
        saved = position.dataset_state or {}
        self._check_kind(saved)
        set_epoch(self._dataset, position.epoch)
        if self._stateful:
            self._dataset.load_state_dict(saved.get("stream", self._first_state))
            items = self._samples(position.samples, position.epoch)
            states = ((item, {"stream": self._dataset.state_dict()}) for item in items)
        else:
            items = self._samples(0, position.epoch)
            what = f"dataset {type(self._dataset).__name__}"
            repeated = repeat_from(items, position, self._bytes_of, what)
            states = ((item, {"taken": taken}) for item, taken in repeated)
        for (number, found), state in states:
            length, sample = self._checked(number, found)
            yield SampleEntry(number, number, length, sample, state, position.epoch, length)

    def _checked(self, number: int, sample: Any) -> tuple[int, Any]:
        return read_sample(lambda: sample, number, *self._how)

    def _samples(self, number: int, epoch: int) -> Iterator[tuple[int, Any]]:
        samples = iter(self._dataset)
        if self._begun:
            allowed = "a list, a Dataset or an IterableDataset"
            check_repeatable("dataset", self._dataset, samples, allowed)
        self._begun = True
        while True:
            try:
                with SeededRandom(self._options.seed, epoch, number):
                    sample = next(samples)
            except StopIteration:
                return
            except Exception as error:
                raise SampleError(number, "reading", error) from error
            yield number, sample
            number += 1

    def _bytes_of(self, item: tuple[int, Any]) -> bytes:
        number, sample = item
        try:
            return sample_bytes(sample, number, self._options.token_fields)
        except ValueError:  # a malformed sample, which is dropped
            return b"left out"

    def _check_kind(self, saved: dict[str, Any]) -> None:
        wanted = "stream" if self._stateful else "taken"
        if saved and wanted not in saved:
            now, before = ("with", "without") if self._stateful else ("without", "with")
            raise ValueError(
                f"the loader state was saved from a stream {before} a state_dict; this "
                f"{type(self._dataset).__name__} is a stream {now} one"
            )


def _has_exact_state(dataset: Any) -> bool:
    """Whether the dataset's own state determines the next samples. The state of Hugging Face's
    `datasets` does not include a shuffle buffer: the samples in it would be lost."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    return not _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None))


def _has_shuffle_buffer(examples: Any) -> bool:
    if examples is None:
        return False
    if "BufferShuffled" in type(examples).__name__:
        return True
    inner = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return any(_has_shuffle_buffer(one) for one in inner)
