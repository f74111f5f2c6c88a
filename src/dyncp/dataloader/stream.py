"""Datasets that can only be iterated. Every rank reads the whole stream."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.entry import Entry
from dyncp.dataloader.errors import SampleError
from dyncp.dataloader.generators import Drawing
from dyncp.dataloader.order import Taken, set_epoch
from dyncp.dataloader.samples import sample_bytes
from dyncp.dataloader.skipping import read_sample
from dyncp.dataloader.state import Position


class StreamSource:
    """A dataset with `state_dict` resumes by its own state, unless that is known to leave something
    out; others by reading again what was read before, which must be the same."""

    random_access = False
    knows_lengths = False
    num_samples: int | None = None

    def __init__(self, dataset: Any, config: LoaderConfig) -> None:
        self._dataset, self._config = dataset, config
        self._stateful = has_exact_state(dataset)
        self._first_state = dataset.state_dict() if self._stateful else None
        self._begun = False

    def start(self, position: Position) -> Position:
        return position

    def rewind(self, position: Position) -> Position:
        return position.next_epoch(position.epoch)

    def entries(self, position: Position) -> Iterator[Entry]:
        saved = position.dataset_state or {}
        self._check_kind(saved)
        set_epoch(self._dataset, position.epoch)
        if self._stateful:
            self._dataset.load_state_dict(saved.get("stream", self._first_state))
        taken, skipped = Taken(), 0 if self._stateful else position.samples
        samples = self._samples(position.samples - skipped, position.epoch)
        for place, sample in islice(samples, skipped):
            taken.add(_bytes_of(sample, place, self._config))
        if skipped:
            taken.check(skipped, saved["taken"], f"dataset {type(self._dataset).__name__}")
        for place, found in samples:
            length, sample = read_sample(partial(_itself, found), place, self._config)
            if self._stateful:
                state = {"stream": self._dataset.state_dict()}
            else:
                taken.add(_bytes_of(found, place, self._config))
                state = {"taken": taken.text()}
            yield Entry(place, place, length, sample, state, position.epoch, length)

    def read(self, entry: Entry) -> Any:
        return entry.sample

    def read_ahead(self, entries: Iterable[Entry]) -> None:
        """A stream has been read."""

    def open(self) -> None:
        """A stream is read in the loader's thread."""

    def close(self) -> None:
        """Nothing is open."""

    def by_lengths(self) -> None:
        return None

    def terms(self) -> dict[str, str]:
        """Nothing is known of a stream before it is read."""
        return {}

    def probes(self) -> Mapping[int, Any]:
        return {}

    def _samples(self, place: int, epoch: int) -> Iterator[tuple[int, Any]]:
        samples = iter(self._dataset)
        if self._begun and samples is self._dataset:
            raise ValueError(
                f"the dataset is a {type(self._dataset).__name__}, which can be iterated once; "
                "give a list, a Dataset or an IterableDataset for further epochs or resuming"
            )
        self._begun = True
        while True:
            try:
                with Drawing(self._config.seed, epoch, place):
                    sample = next(samples)
            except StopIteration:
                return
            except Exception as error:
                raise SampleError(place, "reading", error) from error
            yield place, sample
            place += 1

    def _check_kind(self, saved: dict[str, Any]) -> None:
        wanted = "stream" if self._stateful else "taken"
        if saved and wanted not in saved:
            raise ValueError(
                f"loader state is of a stream {'without' if self._stateful else 'with'} a state of "
                f"its own; {type(self._dataset).__name__} resumes the other way"
            )


def _itself(sample: Any) -> Any:
    return sample


def _bytes_of(sample: Any, place: int, config: LoaderConfig) -> bytes:
    """What stands for a sample, also for one that is left out."""
    try:
        return sample_bytes(sample, place, config.token_fields)
    except ValueError:
        return b"left out"


def has_exact_state(dataset: Any) -> bool:
    """Whether the dataset's own state is all that its next samples depend on. A shuffle buffer of
    Hugging Face's `datasets` is not in its state: samples in it would be lost."""
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
