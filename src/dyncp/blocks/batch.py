"""A batch as the planner sees it: sequence lengths and, per mask name, one mask per sequence."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dyncp.arrays import Int64, starts_of
from dyncp.checks import MOST_TOKENS, instance_of, whole_number
from dyncp.masks import LinearRanges, Mask, find_runs, positions_and_targets

DEFAULT_MASK = "default"


@dataclass(frozen=True)
class Batch:
    """Sequences that are trained on together. `sample_ids` (optional) say which samples they are.

    A token's *coordinate* is its sequence's offset in the batch plus its position in the sequence:
    with lengths [3, 2] the second sequence has coordinates 3 and 4. The masks of a sequence have
    different names and one text: those that set positions or targets must agree.
    """

    lengths: tuple[int, ...]
    masks: Mapping[str, tuple[Mask, ...]]
    sample_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lengths = tuple(whole_number("a length", n, 0, 2**63) for n in self.lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "sample_ids", tuple(map(_whole_id, self.sample_ids)))
        if not lengths or min(lengths) < 1:
            raise ValueError(
                f"batch lengths are {list(self.lengths)}; at least one sequence is needed, "
                "each with at least one token"
            )
        if self.num_tokens > MOST_TOKENS:
            raise ValueError(
                f"a batch has {self.num_tokens:,} tokens; at most {MOST_TOKENS:,} are allowed"
            )
        if self.sample_ids and len(self.sample_ids) != len(lengths):
            raise ValueError(
                f"a batch has {len(self.sample_ids)} sample_ids for {len(lengths)} sequences; give "
                "one for each, or none"
            )
        if not self.masks:
            raise ValueError("a batch needs at least one named mask; got none")
        for name, masks in self.masks.items():
            _check_lengths(name, masks, self.lengths)
        for index in range(len(lengths) if len(self.masks) > 1 else 0):
            _check_one_text(index, [masks[index] for masks in self.masks.values()])

    @staticmethod
    def of(masks: Sequence[Mask | Mapping[str, Mask]], sample_ids: Sequence[int] = ()) -> "Batch":
        """A batch from one entry per sequence: a mask, or several masks by name."""
        instance_of("masks", masks, Iterable, "a list with one entry per sequence")
        instance_of("sample_ids", sample_ids, Iterable, "a list with one id per sequence")
        named = [_by_name(index, entry) for index, entry in enumerate(masks)]
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
    def runs(self) -> dict[str, LinearRanges]:
        """Key ranges of all sequences, by mask name."""
        return {
            name: find_runs([mask.ranges for mask in masks]) for name, masks in self.masks.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "runs"}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of lengths, masks and sample ids: equal on all ranks that have the same batch."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.lengths, self.sample_ids, sorted(self.masks))).encode())
        for name in sorted(self.masks):
            for mask in self.masks[name]:
                digest.update(mask.digest)
        return digest.hexdigest()


def _by_name(index: int, entry: Any) -> dict[str, Mask]:
    given = {DEFAULT_MASK: entry} if isinstance(entry, Mask) else entry
    named = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    if not named or not all(isinstance(mask, Mask) for mask in given.values()):
        raise ValueError(
            f"entry {index} of a batch is {entry!r}; expected a Mask, such as masks.causal(4096), "
            "or a dict of masks by name"
        )
    return dict(given)


def _whole_id(sample_id: Any) -> int:
    return whole_number("a sample id", sample_id, -(2**63), 2**63 - 1)


def _check_one_text(index: int, masks: Sequence[Mask]) -> None:
    try:
        positions_and_targets(masks)
    except ValueError as error:
        raise ValueError(f"sequence {index} of a batch: {error}") from None


def _check_lengths(name: str, masks: Sequence[Mask], lengths: Sequence[int]) -> None:
    instance_of(f"mask {name!r}", masks, (tuple, list), "a tuple with one Mask per sequence")
    for mask in masks:
        instance_of(f"a mask named {name!r}", mask, Mask, "a Mask")
    if len(masks) != len(lengths):
        raise ValueError(f"mask {name!r} has {len(masks)} masks for {len(lengths)} sequences")
    for index, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        if mask.length != length:
            raise ValueError(
                f"mask {name!r} of sequence {index} is for {mask.length} tokens, "
                f"but the sequence has {length}; mask and sequence must be equally long"
            )
