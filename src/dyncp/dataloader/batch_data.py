"""BatchData: the samples and masks of one batch, read and made when they are needed."""

import threading
from collections.abc import Iterable
from typing import Any

from dyncp.blocks import Batch
from dyncp.dataloader.batching import Selection
from dyncp.dataloader.dataset import Source
from dyncp.dataloader.samples import checked_masks, masks_of
from dyncp.masks import Mask, MaskFunction, NamedMasks


class Masking:
    """Calls the mask function: with a length where that is all it needs, else with the sample."""

    def __init__(self, mask_fn: Any) -> None:
        if not callable(mask_fn):
            raise ValueError(
                f"mask_fn is {type(mask_fn).__name__}; allowed is a function of a sample, such as "
                "masks.causal"
            )
        self.mask_fn = mask_fn
        self.takes_lengths = isinstance(mask_fn, MaskFunction | NamedMasks)

    def by_length(self, length: int, index: int) -> dict[str, Mask] | Mask | None:
        """The mask of a sample known by its length alone; None if the sample has to be read."""
        if not self.takes_lengths:
            return None
        try:
            return checked_masks(self.mask_fn(length), length, index)
        except Exception:  # a parameter comes from the sample; a real mistake shows there too
            self.takes_lengths = False
            return None


class BatchData:
    """Two threads use it: one plans, one cuts local data."""

    def __init__(self, selection: Selection, source: Source, masking: Masking) -> None:
        self.selection = selection
        self._source, self._masking = source, masking
        self._samples: dict[int, Any] = {}
        self._masks: dict[int, dict[str, Mask] | Mask] = {}
        self._batch: Batch | None = None
        self._lock = threading.RLock()

    @property
    def lengths(self) -> list[int]:
        return [entry.length for entry in self.selection.entries]

    def sample(self, number: int) -> Any:
        """The batch's sample `number`."""
        with self._lock:
            if number not in self._samples:
                self._samples[number] = self._source.sample(self.selection.entries[number])
            return self._samples[number]

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Samples that will be asked for soon."""
        entries = self.selection.entries
        self._source.read_ahead(entries[n] for n in numbers if n not in self._samples)

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

    def without_reading(self) -> bool:
        """Whether `batch` reads no more samples than were read already."""
        return not self._source.knows_lengths or self._masking.takes_lengths

    def _make_masks(self, number: int) -> dict[str, Mask] | Mask:
        entry = self.selection.entries[number]
        if self._source.knows_lengths and number not in self._samples:
            masks = self._masking.by_length(entry.length, entry.index)
            if masks is not None:
                return masks
        return masks_of(self._masking.mask_fn, self.sample(number), entry.index)
