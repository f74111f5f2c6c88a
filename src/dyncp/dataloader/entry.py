"""Entry: a sample in the order of an epoch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Entry:
    """A sample in the order of an epoch: its place there, its index in the dataset, its tokens.

    `sample` is there if it had to be read to learn its length; without tokens it is the reason why
    the sample is left out. `dataset_state` is what the source needs to go on after it. `whole` is
    its length before it was cut to the `length` tokens from `start` on."""

    place: int
    index: int
    length: int
    sample: Any = None
    dataset_state: Any = None
    epoch: int = 0
    whole: int = 0
    start: int = 0
