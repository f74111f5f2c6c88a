"""Access to datasets: by index (lists, torch and Hugging Face datasets), or as streams."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import numpy as np
from torch.utils.data import IterableDataset

from dyncp.arrays import Int64
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.entry import Entry
from dyncp.dataloader.errors import SampleError
from dyncp.dataloader.generators import Drawing
from dyncp.dataloader.order import SampledOrder, digest_of
from dyncp.dataloader.samples import input_ids_of, sample_bytes
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
        """The sample of an entry, as the dataset gives it."""

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
        self._lengths = None if config.lengths is None else find_lengths(dataset, config.lengths)
        self.knows_lengths = self._lengths is not None
        self._sampled = None if config.order is None else SampledOrder(config.order, config.seed)
        self._reading = threading.Lock()  # datasets need not be safe in several threads

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
        for place, (index, state) in enumerate(self._order(position), position.samples):
            yield self._entry(place, int(index), position.epoch, state)

    def lists(self, position: Position) -> Iterator[list[Entry]]:
        """The entries of every list of a batch sampler."""
        assert self._sampled is not None
        for indices, state in self._sampled.items(self.start(position)):
            yield [self._entry(n, int(i), position.epoch, state) for n, i in enumerate(indices)]

    def read(self, entry: Entry) -> Any:
        if entry.sample is not None:
            return entry.sample
        sample = self._read(entry.index, entry.epoch)
        self._check_length(entry, len(input_ids_of(sample, entry.index)))
        return sample

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
            return self._read(index, 0)
        except SampleError:  # it may not be in the sampler's order; if it is, it shows there
            return None

    def _digest(self, sample: Any, index: int) -> str:
        try:
            return digest_of(sample_bytes(sample, index, self._config.token_fields))
        except ValueError:
            return "not readable"

    def _entry(self, place: int, index: int, epoch: int, state: Any) -> Entry:
        if self._lengths is not None:
            length, sample = int(self._lengths[index]), None
        else:
            sample = self._read(index, epoch)
            length = len(input_ids_of(sample, index))
        return Entry(place, index, length, sample, state, epoch, length)

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

    def _read(self, index: int, epoch: int) -> Any:
        try:
            with self._reading, Drawing(self._config.seed, epoch, index):
                return self._dataset[index]
        except Exception as error:
            raise SampleError(index, "reading", error) from error


def find_lengths(dataset: Any, lengths: Any) -> Int64:
    """Tokens of every sample: an array as given, or a column of the dataset by its name."""
    if isinstance(lengths, str):
        lengths = _column(dataset, lengths)
    array = np.asarray(lengths)
    if array.shape != (len(dataset),) or array.dtype.kind not in "iu":
        raise ValueError(
            f"lengths is {array.dtype} of shape {array.shape}; one integer per sample is needed, "
            f"and the dataset has {len(dataset)}"
        )
    if len(array) and array.min() < 1:
        at = int(array.argmin())
        raise ValueError(f"lengths says {array[at]} tokens for sample {at}; at least 1 is needed")
    return array.astype(np.int64)


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
