"""BatchData: the samples and masks of one batch, read and made when they are needed."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from dyncp.blocks import Batch
from dyncp.dataloader.batching import Selection
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.dataset import Source
from dyncp.dataloader.decision import MARK, SampleMark
from dyncp.dataloader.entry import Entry
from dyncp.dataloader.generators import Drawing
from dyncp.dataloader.order import digest_of
from dyncp.dataloader.samples import checked_masks, cut_masks, cut_sample, masks_of, sample_bytes
from dyncp.masks import Mask, MaskFunction, NamedMasks


class Masking:
    """Calls the mask function: with a length where that is all it needs, else with the sample."""

    def __init__(self, mask_fn: Any, seed: int = 0) -> None:
        if not callable(mask_fn):
            raise ValueError(
                f"mask_fn is {type(mask_fn).__name__}; allowed is a function of a sample, such as "
                "masks.causal"
            )
        self._mask_fn, self._seed = mask_fn, seed
        self.takes_lengths = isinstance(mask_fn, MaskFunction | NamedMasks)

    def by_length(self, length: int, index: int) -> dict[str, Mask] | Mask | None:
        """The mask of a sample known by its length alone; None if the sample has to be read."""
        if not self.takes_lengths:
            return None
        try:
            return checked_masks(self._mask_fn(length), length, index)
        except Exception:  # a parameter comes from the sample; a real mistake shows there too
            self.takes_lengths = False
            return None

    def terms(self, source: Source) -> dict[str, str]:
        """What stands for the function: its masks of a few samples."""
        return {
            f"masks of sample {index}": self._digest_of(sample, index)
            for index, sample in source.probes().items()
            if sample is not None
        }

    def _digest_of(self, sample: Any, index: int) -> str:
        try:
            return _digest_of_masks(self.of_sample(sample, Entry(0, index, 0)))
        except Exception as error:  # one that is not trained on, perhaps; else it shows there
            return type(error).__name__

    def of_sample(self, sample: Any, entry: Entry) -> dict[str, Mask] | Mask:
        """The mask of a sample, in its whole length."""
        drawing = Drawing(self._seed, entry.epoch, entry.index, "mask")
        return masks_of(self._mask_fn, sample, entry.index, drawing)


class BatchData:
    """Two threads use it: one plans, one cuts local data."""

    def __init__(
        self, selection: Selection, source: Source, masking: Masking, config: LoaderConfig
    ) -> None:
        self.selection = selection
        self._source, self._masking, self._config = source, masking, config
        self._read: dict[int, Any] = {}
        self._samples: dict[int, Any] = {}
        self._masks: dict[int, dict[str, Mask] | Mask] = {}
        self._contents: dict[int, str] = {}
        self._batch: Batch | None = None
        self._lock = threading.RLock()

    @property
    def lengths(self) -> list[int]:
        return [entry.length for entry in self.selection.entries]

    def sample(self, number: int) -> Any:
        """The batch's sample `number`, cut to its length there."""
        with self._lock:
            if number not in self._samples:
                entry, fields = self.selection.entries[number], self._config.token_fields
                sample = self._whole(number)
                if entry.length != entry.whole:
                    sample = cut_sample(sample, entry.start, entry.length, entry.index, fields)
                self._samples[number] = sample
            return self._samples[number]

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Samples that will be asked for soon."""
        entries = self.selection.entries
        self._source.read_ahead(entries[n] for n in numbers if n not in self._read)

    def masks(self, number: int) -> dict[str, Mask] | Mask:
        """The mask, or masks by name, of the batch's sample `number`."""
        with self._lock:
            if number not in self._masks:
                self._masks[number] = self._make_masks(number)
            return self._masks[number]

    def batch(self) -> Batch:
        """The batch as the planner sees it."""
        with self._lock:
            if self._batch is None:
                numbers = range(len(self.selection.entries))
                if not self.without_reading():
                    self.read_ahead(numbers)
                indices = [entry.index for entry in self.selection.entries]
                self._batch = Batch.of([self.masks(number) for number in numbers], indices)
            return self._batch

    def marks(self) -> dict[int, SampleMark]:
        """What this rank knows of the batch's samples by now: of masks that were made, and of
        samples that were read."""
        with self._lock:
            for number in self._read:
                if number not in self._contents:
                    entry, fields = self.selection.entries[number], self._config.token_fields
                    content = sample_bytes(self.sample(number), entry.index, fields)
                    self._contents[number] = digest_of(content)[:MARK]
            return {
                number: SampleMark(
                    entry.index,
                    entry.length,
                    _digest_of_masks(self._masks.get(number, {})),
                    self._contents.get(number, ""),
                )
                for number, entry in enumerate(self.selection.entries)
            }

    def without_reading(self) -> bool:
        """Whether `batch` reads no more samples than were read already."""
        return not self._source.knows_lengths or self._masking.takes_lengths

    def _make_masks(self, number: int) -> dict[str, Mask] | Mask:
        """Of the sample as the dataset gave it, then cut as the sample is: a mask may be made of
        any of its fields."""
        entry, masks = self.selection.entries[number], None
        if self._source.knows_lengths:
            masks = self._masking.by_length(entry.whole, entry.index)
        if masks is None:
            masks = self._masking.of_sample(self._whole(number), entry)
        return cut_masks(masks, entry.start, entry.length)

    def _whole(self, number: int) -> Any:
        if number not in self._read:
            self._read[number] = self._source.read(self.selection.entries[number])
        return self._read[number]


def _digest_of_masks(masks: Mapping[str, Mask] | Mask) -> str:
    named = {"": masks} if isinstance(masks, Mask) else masks
    text = [f"{name} {mask.digest.hex()}" for name, mask in sorted(named.items())]
    return digest_of(repr(text).encode())[:MARK] if text else ""
