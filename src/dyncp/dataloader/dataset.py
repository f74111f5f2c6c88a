"""Access to datasets: by index (lists, torch and Hugging Face datasets), or as streams."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
from torch.utils.data import IterableDataset

from dyncp.arrays import Int64
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.entry import Entry
from dyncp.dataloader.errors import SampleError
from dyncp.dataloader.order import SampledOrder, digest_of
from dyncp.dataloader.reading import Reader
from dyncp.dataloader.samples import sample_bytes
from dyncp.dataloader.skipping import read_sample
from dyncp.dataloader.state import Position
from dyncp.dataloader.stream import StreamSource


class Source(Protocol):
    """Samples in the order of an epoch."""

    num_samples: int | None  # None: unknown
    knows_lengths: bool  # without reading samples
    random_access: bool

    def start(self, position: Position) -> Position:
        """The position, with what is needed to begin there once more, if it is an epoch's start."""

    def rewind(self, position: Position) -> Position:
        """The start of the position's epoch."""

    def entries(self, position: Position) -> Iterator[Entry]:
        """The samples from a position on; lengths are those of the dataset."""

    def read(self, entry: Entry) -> Any:
        """The sample of an entry, as the dataset gives it, without its padding."""

    def read_ahead(self, entries: Iterable[Entry]) -> None:
        """Samples that will be asked for soon."""

    def open(self) -> None:
        """Starts reading workers."""

    def close(self) -> None:
        """Ends reading workers."""

    def by_lengths(self) -> "MapSource | None":
        """The same samples in the same order without reading any; None if not all lengths are
        known yet."""

    def terms(self) -> dict[str, str]:
        """What stands for the dataset, by name; equal for equal ones."""

    def probes(self) -> Mapping[int, Any]:
        """A few samples by their indices, read once (None: that failed)."""


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
        self._found = np.full(len(dataset), -1, np.int64)  # lengths of samples that were read
        self._reader = Reader(dataset, config.num_workers, config.seed)
        self._sampled = None if config.order is None else SampledOrder(config.order, config.seed)

    def start(self, position: Position) -> Position:
        if self._sampled is None or position.dataset_state is not None:
            return position
        return replace(position, dataset_state=self._sampled.start())

    def rewind(self, position: Position) -> Position:
        start, state = position.next_epoch(position.epoch), position.dataset_state
        if self._sampled is None or state is None:
            return start
        return replace(start, dataset_state=self._sampled.rewind(state))

    def aside(self) -> AbstractContextManager[None]:
        """Inside it the order may be read without a trace."""
        return nullcontext() if self._sampled is None else self._sampled.aside()

    def entries(self, position: Position) -> Iterator[Entry]:
        return self._numbered(self._order(position), position.epoch, position.samples)

    def lists(self, position: Position) -> Iterator[list[Entry]]:
        """The entries of every list of a batch sampler."""
        assert self._sampled is not None
        for indices, state in self._sampled.items(self.start(position)):
            listed = ((int(index), state) for index in indices)
            yield list(self._numbered(listed, position.epoch, 0))

    def read(self, entry: Entry) -> Any:
        if entry.sample is not None:
            return entry.sample
        read = partial(self._reader.read, (entry.epoch, entry.index))
        length, sample = read_sample(read, entry.index, self._config)
        self._check_length(entry, length)
        return sample

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

    def terms(self) -> dict[str, str]:
        """Of lengths, if they are known, and of a few samples."""
        terms = {"number of samples": str(self.num_samples)}
        if self._lengths is not None:
            terms["lengths"] = digest_of(self._lengths.tobytes())
        for index, sample in self.probes().items():
            terms[f"sample {index}"] = self._digest(sample, index)
        return terms

    def probes(self) -> Mapping[int, Any]:
        return self._probes

    @cached_property
    def _probes(self) -> dict[int, Any]:
        """The first, middle and last sample."""
        last = (self.num_samples or 0) - 1
        return {i: self._probe(i) for i in sorted({0, last // 2, last})} if last >= 0 else {}

    def _probe(self, index: int) -> Any:
        try:
            return self._reader.read_here((0, index))
        except SampleError:  # it may not be in the sampler's order; if it is, it shows there
            return None

    def _digest(self, sample: Any, index: int) -> str:
        try:
            return digest_of(sample_bytes(sample, index, self._config.token_fields))
        except ValueError:
            return "not readable"

    def _numbered(
        self, order: Iterator[tuple[int, Any]], epoch: int, first: int
    ) -> Iterator[Entry]:
        """Entries of indices, each with the state after it; samples are only read where their
        lengths are not known."""
        if self._lengths is not None:
            for place, (index, state) in enumerate(order, first):
                length = int(self._lengths[index])
                yield Entry(place, int(index), length, None, state, epoch, length)
            return
        read_in_order = enumerate(self._reader.in_order(order, epoch), first)
        for place, (index, state, read) in read_in_order:
            length, sample = read_sample(read, index, self._config)
            self._found[index] = length
            yield Entry(place, index, length, sample, state, epoch, length)

    def _check_length(self, entry: Entry, found: int) -> None:
        if found != entry.whole:
            raise ValueError(
                f"sample {entry.index} has {found} tokens; lengths= says {entry.whole}"
            )

    def _order(self, position: Position) -> Iterator[tuple[int, Any]]:
        if self._sampled is not None:
            return self._sampled.items(self.start(position))
        indices: Iterable[int] = range(self.num_samples or 0)
        if self._config.shuffle:
            rng = np.random.default_rng((self._config.seed, position.epoch))
            indices = rng.permutation(self.num_samples or 0).tolist()
        return ((index, None) for index in islice(indices, position.samples, None))


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
