"""Access to datasets: by index (lists, torch and Hugging Face datasets), or as streams."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
from torch.utils.data import IterableDataset

from dyncp.arrays import Int64
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.errors import SampleError
from dyncp.dataloader.reading import Reader
from dyncp.dataloader.samples import cut_sample, input_ids_of
from dyncp.dataloader.skipping import read_sample
from dyncp.dataloader.state import Position


@dataclass(frozen=True, eq=False)
class Entry:
    """A sample in the order of an epoch: its place there, its index in the dataset, its tokens.

    Of a sample that is cut, `length` tokens from `start` on. `sample` is there if it had to be read
    to learn its length; without tokens it is the reason why the sample is left out. `dataset_state`
    is that of a stream after it."""

    place: int
    index: int
    length: int
    sample: Any = None
    dataset_state: Any = None
    start: int = 0
    epoch: int = 0


class Source(Protocol):
    """Samples in the order of an epoch."""

    num_samples: int | None  # None: unknown
    knows_lengths: bool  # without reading samples
    random_access: bool

    def entries(self, position: Position) -> Iterator[Entry]:
        """The samples from a position on; lengths are those of the dataset."""

    def sample(self, entry: Entry) -> Any:
        """The sample of an entry, cut to the entry's length."""

    def read_ahead(self, entries: Iterable[Entry]) -> None:
        """Samples that will be asked for soon."""

    def open(self) -> None:
        """Starts reading workers."""

    def close(self) -> None:
        """Ends reading workers."""

    def by_lengths(self) -> "Source | None":
        """The same samples in the same order without reading any; None if not all lengths are
        known yet."""


def open_source(dataset: Any, config: LoaderConfig) -> Source:
    if is_map_style(dataset):
        return MapSource(dataset, config)
    for name, given in (
        ("shuffle=True", config.shuffle),
        ("sampler=", config.sampler is not None),
        ("batch_sampler=", config.batch_sampler is not None),
        ("lengths=", config.lengths is not None),
        ("num_workers=", config.num_workers > 0),
    ):
        if given:
            raise ValueError(
                f"{name} needs a dataset with __len__ and __getitem__; "
                f"{type(dataset).__name__} can only be iterated"
            )
    return StreamSource(dataset, config)


def is_map_style(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


class MapSource:
    random_access = True

    def __init__(self, dataset: Any, config: LoaderConfig) -> None:
        self._dataset, self._config = dataset, config
        self.num_samples: int | None = len(dataset)
        least = 0 if config.empty_samples == "drop" else 1
        given = config.lengths
        self._lengths = None if given is None else find_lengths(dataset, given, least)
        self.knows_lengths = self._lengths is not None
        self._reader = Reader(dataset, config.num_workers, config.seed)
        self._found = np.full(len(dataset), -1, np.int64)  # lengths of samples that were read

    def entries(self, position: Position) -> Iterator[Entry]:
        order = islice(self._order(position.epoch), position.samples, None)
        return self.numbered(order, position.epoch, position.samples)

    def numbered(self, indices: Iterable[int], epoch: int, first: int = 0) -> Iterator[Entry]:
        """Entries of these indices; samples are only read where their lengths are not known."""
        if self._lengths is not None:
            for place, index in enumerate(indices, first):
                yield Entry(place, index, int(self._lengths[index]), epoch=epoch)
            return
        for place, (index, read) in enumerate(self._reader.in_order(indices, epoch), first):
            length, sample = read_sample(read, index, self._config)
            self._found[index] = length
            yield Entry(place, index, length, sample, epoch=epoch)

    def sample(self, entry: Entry) -> Any:
        if entry.sample is not None:
            return cut_to(entry, entry.sample, self._config)
        read = partial(self._reader.read, (entry.epoch, entry.index))
        length, sample = read_sample(read, entry.index, self._config)
        self._check_length(entry, length)
        return cut_to(entry, sample, self._config)

    def read_ahead(self, entries: Iterable[Entry]) -> None:
        self._reader.ahead((e.epoch, e.index) for e in entries if e.sample is None)

    def open(self) -> None:
        self._reader.start()

    def close(self) -> None:
        self._reader.close()

    def by_lengths(self) -> "MapSource | None":
        if self.knows_lengths:
            return self
        lengths = self._found if (self._found >= 0).all() else lengths_in_memory(self._dataset)
        if lengths is None:
            return None
        counting = copy(self)  # which does not know lengths either, and so fills the same batches
        counting._lengths = lengths
        return counting

    def _check_length(self, entry: Entry, found: int) -> None:
        assert self._lengths is not None
        if found != self._lengths[entry.index]:
            raise ValueError(
                f"sample {entry.index} has {found} tokens; lengths= says "
                f"{self._lengths[entry.index]}"
            )

    def _order(self, epoch: int) -> Iterator[int]:
        if self._config.sampler is not None:
            _set_epoch(self._config.sampler, epoch)
            return map(int, self._config.sampler)
        if not self._config.shuffle:
            return iter(range(self.num_samples or 0))
        order = np.random.default_rng((self._config.seed, epoch)).permutation(self.num_samples or 0)
        return iter(order.tolist())


class StreamSource:
    """Every rank reads the whole stream. A dataset with `state_dict` resumes by its own state,
    others by reading again what was read before."""

    random_access = False
    knows_lengths = False
    num_samples: int | None = None

    def __init__(self, dataset: Any, config: LoaderConfig) -> None:
        self._dataset, self._config = dataset, config
        self._stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._first_state = dataset.state_dict() if self._stateful else None

    def entries(self, position: Position) -> Iterator[Entry]:
        _set_epoch(self._dataset, position.epoch)
        resumes = self._stateful and position.dataset_state is not None
        if self._stateful:
            self._dataset.load_state_dict(position.dataset_state if resumes else self._first_state)
        samples = self._samples(position.samples if resumes else 0)
        skipped = 0 if resumes else position.samples
        for place, found in islice(samples, skipped, None):
            state = self._dataset.state_dict() if self._stateful else None
            length, sample = read_sample(partial(_itself, found), place, self._config)
            yield Entry(place, place, length, sample, state)

    def _samples(self, place: int) -> Iterator[tuple[int, Any]]:
        samples = iter(self._dataset)
        while True:
            try:
                sample = next(samples)
            except StopIteration:
                return
            except Exception as error:
                raise SampleError(place, "reading", error) from error
            yield place, sample
            place += 1

    def sample(self, entry: Entry) -> Any:
        return cut_to(entry, entry.sample, self._config)

    def read_ahead(self, entries: Iterable[Entry]) -> None:
        """A stream has been read."""

    def open(self) -> None:
        """A stream is read in the loader's thread."""

    def close(self) -> None:
        """Nothing is open."""

    def by_lengths(self) -> None:
        return None


def cut_to(entry: Entry, sample: Any, config: LoaderConfig) -> Any:
    """The part of a sample that the entry stands for."""
    if len(input_ids_of(sample, entry.index)) == entry.length:
        return sample
    return cut_sample(sample, entry.start, entry.length, config.token_fields)


def _itself(sample: Any) -> Any:
    return sample


def find_lengths(dataset: Any, lengths: Any, least: int = 1) -> Int64:
    """Tokens of every sample: an array as given, or a column of the dataset by its name."""
    if isinstance(lengths, str):
        lengths = _column(dataset, lengths)
    array = np.asarray(lengths)
    if array.shape != (len(dataset),) or array.dtype.kind not in "iu":
        raise ValueError(
            f"lengths is {array.dtype} of shape {array.shape}; one integer per sample is needed, "
            f"and the dataset has {len(dataset)}"
        )
    if len(array) and array.min() < least:
        at = int(array.argmin())
        hint = "" if array[at] else ", or empty_samples='drop'"
        raise ValueError(
            f"lengths says {array[at]} tokens for sample {at}; at least {least} is needed{hint}"
        )
    return array.astype(np.int64)


def lengths_in_memory(dataset: Any) -> Int64 | None:
    """Tokens of every sample of a list of plain samples; None for anything else."""
    if not isinstance(dataset, list | tuple):
        return None
    if not all(isinstance(sample, dict) and sample.keys() >= {"input_ids"} for sample in dataset):
        return None
    if any(sample.keys() & {"attention_mask", "padding_mask"} for sample in dataset):
        return None
    if not all(isinstance(sample["input_ids"], Sized) for sample in dataset):
        return None
    return np.array([len(sample["input_ids"]) for sample in dataset], np.int64)


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
        f"lengths is {name!r}, but {type(dataset).__name__} has no columns; give an array of "
        "lengths instead"
    )


def _set_epoch(what: Any, epoch: int) -> None:
    """Samplers and datasets that shuffle themselves do it by epoch."""
    if hasattr(what, "set_epoch"):
        what.set_epoch(epoch)
