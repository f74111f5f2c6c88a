"""Samples that are left out: bad, empty or too long, by the policies of the config."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.errors import EmptySample, SampleError
from dyncp.dataloader.padding import without_padding
from dyncp.dataloader.samples import input_ids_of, labels_of, token_field

logger = logging.getLogger(__name__)

TOLD = 3  # samples of each kind that a warning names


class Skipped:
    """Counts samples by why they were left out; the first of each kind are logged."""

    def __init__(self, told: int = TOLD) -> None:
        self.counts: Counter[str] = Counter()
        self._told = told
        self._lock = threading.Lock()

    def add(self, why: str, index: int, text: object) -> None:
        with self._lock:
            self.counts[why] += 1
            told = self.counts[why]
        if told <= self._told:
            more = "; more of this kind are only counted" if told == self._told else ""
            logger.warning("sample %s is left out (%s): %s%s", index, why, text, more)


def read_sample(
    read: Callable[[], Any], index: int, config: LoaderConfig
) -> tuple[int, Any | Exception]:
    """A sample without its padding, and its tokens; 0 tokens with the reason for a sample that is
    to be left out."""
    try:
        sample = without_padding(read(), index, config.token_fields)
        length = len(input_ids_of(sample, index))
        if config.bad_samples == "drop":
            _check_fields(sample, index, config.token_fields)
    except EmptySample as error:
        if config.empty_samples == "drop":
            return 0, error
        raise
    except (SampleError, ValueError) as error:
        if config.bad_samples == "drop":
            return 0, error
        raise
    return length, sample


def why(reason: Any) -> str:
    """The kind of a reason that `read_sample` gave."""
    return "empty" if reason is None or isinstance(reason, EmptySample) else "bad"


def _check_fields(sample: Mapping[str, Any], index: int, token_fields: Mapping[str, int]) -> None:
    """What would otherwise be found when tokens are dealt to ranks, too late to leave it out."""
    ids = input_ids_of(sample, index)
    labels_of(sample, ids, index)
    for name, dim in token_fields.items():
        token_field(sample, name, len(ids), dim, index)
