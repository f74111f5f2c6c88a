"""A batch as the planner sees it: sequence lengths and, per mask name, one mask per sequence."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyncp.arrays import Int64, starts_of
from dyncp.masks import Mask

DEFAULT_MASK = "default"


@dataclass(frozen=True)
class Batch:
    """Sequences that are trained on together. `sample_ids` (optional) say which samples they are.

    A token's *coordinate* is its sequence's offset in the batch plus its position in the sequence:
    with lengths [3, 2] the second sequence has coordinates 3 and 4.
    """

    lengths: tuple[int, ...]
    masks: Mapping[str, tuple[Mask, ...]]
    sample_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(
                f"batch lengths are {list(self.lengths)}; at least one sequence is needed, "
                "each with at least one token"
            )
        if not self.masks:
            raise ValueError("a batch needs at least one named mask; got none")
        for name, masks in self.masks.items():
            _check_lengths(name, masks, self.lengths)

    @staticmethod
    def of(masks: Sequence[Mask | Mapping[str, Mask]], sample_ids: Sequence[int] = ()) -> "Batch":
        """A batch from one entry per sequence: a mask, or several masks by name."""
        named = [{DEFAULT_MASK: m} if isinstance(m, Mask) else dict(m) for m in masks]
        if not named:
            raise ValueError("a batch needs at least one sequence; got no masks")
        for index, entry in enumerate(named):
            if entry.keys() != named[0].keys() or not entry:
                raise ValueError(
                    f"sequence {index} has masks named {sorted(entry)}, sequence 0 has "
                    f"{sorted(named[0])}; every sequence of a batch needs the same mask names"
                )
        by_name = {name: tuple(entry[name] for entry in named) for name in named[0]}
        lengths = tuple(next(iter(entry.values())).length for entry in named)
        return Batch(lengths, by_name, tuple(sample_ids))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def offsets(self) -> Int64:
        """Coordinate of each sequence's first token, and the number of tokens at the end."""
        return starts_of(np.asarray(self.lengths, np.int64))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of lengths, masks and sample ids: equal on ranks that look at the same batch."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.lengths, self.sample_ids, sorted(self.masks))).encode())
        for name in sorted(self.masks):
            for mask in self.masks[name]:
                digest.update(mask.digest)
        return digest.hexdigest()


def _check_lengths(name: str, masks: Sequence[Mask], lengths: Sequence[int]) -> None:
    if len(masks) != len(lengths):
        raise ValueError(f"mask {name!r} has {len(masks)} masks for {len(lengths)} sequences")
    for index, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        if mask.length != length:
            raise ValueError(
                f"mask {name!r} of sequence {index} is for {mask.length} tokens, "
                f"but the sequence has {length}; mask and sequence must be equally long"
            )
