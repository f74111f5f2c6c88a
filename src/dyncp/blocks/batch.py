"""`Batch`, the input of the planner: sequence lengths and, per mask name, one mask per sequence."""

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
    """Sequences that are trained on together. `sample_ids` (optional) identify their samples.

    A token's *coordinate* is its sequence's offset in the batch plus its index in the sequence:
    with lengths [3, 2] the second sequence has coordinates 3 and 4. All masks of a sequence are
    for one text, so masks that set positions or targets must agree on them.
    """

    lengths: tuple[int, ...]
    masks: Mapping[str, tuple[Mask, ...]]
    sample_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lengths = tuple(whole_number("a sequence length", n, 1, 2**63) for n in self.lengths)
        ids = tuple(whole_number("a sample id", n, -(2**63), 2**63 - 1) for n in self.sample_ids)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "sample_ids", ids)
        if not lengths:
            raise ValueError("a batch needs at least one sequence; got none")
        if self.num_tokens > MOST_TOKENS:
            raise ValueError(
                f"a batch has {self.num_tokens:,} tokens; at most {MOST_TOKENS:,} are allowed"
            )
        if self.sample_ids and len(self.sample_ids) != len(lengths):
            raise ValueError(
                f"a batch has {len(self.sample_ids)} sample_ids for {len(lengths)} sequences; pass "
                "one per sequence, or none"
            )
        if not self.masks:
            raise ValueError("a batch needs at least one named mask; got none")
        for name, masks in self.masks.items():
            _check_lengths(name, masks, lengths)
        for index, masks in enumerate(zip(*self.masks.values(), strict=True)):
            try:
                positions_and_targets(masks)
            except ValueError as error:
                raise ValueError(f"sequence {index} of a batch: {error}") from None

    @staticmethod
    def of(masks: Sequence[Mask | Mapping[str, Mask]], sample_ids: Sequence[int] = ()) -> "Batch":
        """Builds a batch from one entry per sequence: a mask, or a dict of masks by name."""
        instance_of("masks", masks, Iterable, "a list with one entry per sequence")
        instance_of("sample_ids", sample_ids, Iterable, "a list with one id per sequence")
        named = [_by_name(index, entry) for index, entry in enumerate(masks)]
        for index, entry in enumerate(named):
            if entry.keys() != named[0].keys():
                raise ValueError(
                    f"sequence {index} has masks named {sorted(entry)}, sequence 0 has "
                    f"{sorted(named[0])}; every sequence of a batch needs the same mask names"
                )
        names = named[0] if named else {DEFAULT_MASK}
        by_name = {name: tuple(entry[name] for entry in named) for name in names}
        lengths = tuple(next(iter(entry.values())).length for entry in named)
        return Batch(lengths, by_name, tuple(sample_ids))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def offsets(self) -> Int64:
        """Coordinate of each sequence's first token, then the number of tokens of the batch."""
        return starts_of(np.asarray(self.lengths, np.int64))

    @cached_property
    def runs(self) -> dict[str, LinearRanges]:
        """Key ranges of all sequences as linear runs of rows, by mask name."""
        return {
            name: find_runs([mask.ranges for mask in masks]) for name, masks in self.masks.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        """Pickles leave `runs` out: the receiver can compute them again."""
        return {name: value for name, value in self.__dict__.items() if name != "runs"}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of lengths, masks and sample ids; ranks with the same batch have the same one."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.lengths, self.sample_ids, sorted(self.masks))).encode())
        for name in sorted(self.masks):
            for mask in self.masks[name]:
                digest.update(mask.digest)
        return digest.hexdigest()


def _by_name(index: int, entry: Any) -> dict[str, Mask]:
    given = {DEFAULT_MASK: entry} if isinstance(entry, Mask) else entry
    named = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    if not named or not given or not all(isinstance(mask, Mask) for mask in given.values()):
        raise ValueError(
            f"entry {index} of a batch is {entry!r}; expected a Mask, such as masks.causal(4096), "
            "or a dict of masks by name"
        )
    return dict(given)


def _check_lengths(name: str, masks: Sequence[Mask], lengths: Sequence[int]) -> None:
    instance_of(f"mask {name!r}", masks, (tuple, list), "a tuple with one Mask per sequence")
    for mask in masks:
        instance_of(f"a mask named {name!r}", mask, Mask, "a Mask")
    if len(masks) != len(lengths):
        raise ValueError(
            f"mask {name!r} has {len(masks)} masks for {len(lengths)} sequences; pass one for each"
        )
    for index, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        if mask.length != length:
            raise ValueError(
                f"mask {name!r} of sequence {index} is for {mask.length} tokens, "
                f"but the sequence has {length}; both must have the same length"
            )
