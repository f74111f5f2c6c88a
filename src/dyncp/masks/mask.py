"""`Mask`: which keys each query token of one sequence may attend, and the interval arithmetic that
`&`, `|` and the named masks use.

The arithmetic handles all tokens at once. Its arrays `starts` and `ends` have shape `[R, tokens]`:
a column holds the ranges of one token. Empty ranges come last in results, as `(length, length)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Bool, Int32
from dyncp.compiled import compiled, inner
from dyncp.masks.pairs import count_tile_pairs

AnyInts = npt.NDArray[np.integer]
ROW_WINDOW = "sliding_window"  # the mask whose window counts rows
LARGEST = np.iinfo(np.int32).max


class Marks(NamedTuple):
    """Properties of a mask's tokens other than their keys, as described in `Mask`. None stands for
    the default."""

    positions: Int32 | None = None
    targets: Int32 | None = None
    branches: Int32 | None = None
    weights: Int32 | None = None


NO_MARKS = Marks()


@dataclass(frozen=True, eq=False)
class Mask:
    """The half-open key ranges that each query token of a sequence may attend.

    `ranges` is `int32[tokens, R, 2]`. Token 3 below attends keys 0, 2 and 3:

        Mask([[[0, 1], [4, 4]],     1 . . .
              [[0, 2], [4, 4]],     1 1 . .
              [[1, 3], [4, 4]],     . 1 1 .
              [[0, 1], [2, 4]]])    1 . 1 1

    `positions` (`int32[tokens]`) is each token's position in its text; None means 0..tokens-1.
    `targets` (`int32[tokens]`) is the index of the token that each token predicts, or -1 for none;
    None means the next token of the sequence, and no target for the last one. `branches`
    (`int32[n, 2]`) lists (token, target) pairs of tokens with several targets; their entry in
    `targets` is -1. `weights` (`int32[tokens]`) is how often each token counts as a target; None
    means once.

    Masks are stored in normal form. The ranges of a token are sorted and disjoint, and touching
    ranges are merged. Empty ranges come last, as (tokens, tokens). A column that is empty for all
    tokens is dropped unless it is the only one. Branches are sorted, and defaults become None. So
    masks that allow the same pairs have the same arrays. The arrays are read-only copies. Masks are
    equal if their arrays are equal (compared by digest), whatever their names.
    """

    ranges: Int32
    positions: Int32 | None = None
    targets: Int32 | None = None
    name: str = "mask"
    branches: Int32 | None = None
    weights: Int32 | None = None

    def __post_init__(self) -> None:
        ranges = _checked_ranges(self.name, self.ranges)
        _set_fields(self, ranges, _checked_marks(self.name, self.marks, len(ranges)), self.name)

    @property
    def length(self) -> int:
        """The number of tokens in the sequence."""
        return int(self.ranges.shape[0])

    @property
    def num_pairs(self) -> int:
        """The number of allowed (query, key) pairs."""
        starts, ends = self.ranges[:, :, 0], self.ranges[:, :, 1]
        return int(ends.sum(dtype=np.int64)) - int(starts.sum(dtype=np.int64))

    @cached_property
    def digest(self) -> bytes:
        """A 16-byte hash of everything except the name."""
        state = hashlib.blake2b(digest_size=16)
        state.update(np.array(self.ranges.shape, "<i8").tobytes())
        state.update(np.ascontiguousarray(self.ranges, "<i4").data)
        for values in self.marks:
            state.update(b"default" if values is None else b"given")
            if values is not None:
                state.update(np.ascontiguousarray(values, "<i4").data)
        return state.digest()

    def resolved_positions(self) -> Int32:
        """The positions as an array, even if they are the default."""
        return default_positions(self.length) if self.positions is None else self.positions

    def resolved_targets(self) -> Int32:
        """The targets as an array, even if they are the default."""
        return default_targets(self.length) if self.targets is None else self.targets

    @property
    def marks(self) -> Marks:
        """Positions, targets, branches and weights."""
        return Marks(self.positions, self.targets, self.branches, self.weights)

    def dense(self) -> Bool:
        """`bool[tokens, tokens]`: whether a query (row) may attend a key (column)."""
        keys = np.arange(self.length, dtype=np.int32)
        allowed = np.zeros((self.length, self.length), np.bool_)
        for column in range(self.ranges.shape[1]):
            start, end = self.ranges[:, column, :1], self.ranges[:, column, 1:]
            allowed |= (keys >= start) & (keys < end)
        return allowed

    def draw(self, width: int = 64) -> str:
        """The mask as text, at most `width` cells wide: queries go down, keys to the right.

        A cell is █ if all its pairs are allowed, ▒ if at least half are, ░ if fewer are, · if none
        are.

            sliding_window: 4 tokens, 7 pairs, density 43.8 %
            █···
            ██··
            ·██·
            ··██
        """
        if width < 1:
            raise ValueError(f"width is {width}; allowed is at least 1 cell")
        block_size = -(-self.length // width)
        pairs = count_tile_pairs(self, block_size)
        edges = np.minimum(np.arange(len(pairs) + 1) * block_size, self.length)
        possible = np.diff(edges)[:, None] * np.diff(edges)
        shades = (pairs > 0) * 1 + (2 * pairs >= possible) + (pairs == possible)
        rows = ["".join("·░▒█"[shade] for shade in row) for row in shades]
        density = 100 * self.num_pairs / self.length**2
        numbers = f"{self.length:,} tokens, {self.num_pairs:,} pairs, density {density:.3g} %"
        return "\n".join([f"{self.name}: {numbers}", *rows])

    def __and__(self, other: Mask) -> Mask:
        """Pairs that both masks allow."""
        if not isinstance(other, Mask):
            return NotImplemented
        _check_distances(self, other)
        _check_distances(other, self)
        return _combine(self, "&", other, intersect)

    def __or__(self, other: Mask) -> Mask:
        """Pairs that at least one of the masks allows."""
        return _combine(self, "|", other, unite) if isinstance(other, Mask) else NotImplemented

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Mask) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Mask {self.name}: {self.length} tokens, {self.num_pairs} pairs>"

    def __reduce__(self) -> tuple[object, ...]:
        return normal_mask, (self.ranges, self.marks, self.name)


def normal_mask(ranges: Int32, marks: Marks = NO_MARKS, name: str = "mask") -> Mask:
    """A mask from arrays in normal form; only marks that equal their defaults may still be arrays.
    Takes ownership of the arrays, without checks or copies."""
    mask = object.__new__(Mask)
    _set_fields(mask, ranges, marks, name)
    return mask


def interval_mask(
    name: str,
    length: int,
    *intervals: tuple[npt.ArrayLike, npt.ArrayLike],
    marks: Marks = NO_MARKS,
) -> Mask:
    """The mask whose tokens attend the union of intervals (starts, ends), which may overlap.

    With 3 tokens, the sink [0, 1) and the window [i, i+1) of token i give

        interval_mask(name, 3, (0, 1), (i, i + 1))  ->  [0, 1) -      overlapping and touching ones
                                                        [0, 2) -      are merged
                                                        [0, 1) [2, 3)
    """
    starts, ends = np.empty((2, len(intervals), length), np.int32)
    for row, (start, end) in enumerate(intervals):
        starts[row] = start
        ends[row] = end
    return normal_mask(merge(starts, ends), marks, name)


def _set_fields(mask: Mask, ranges: Int32, marks: Marks, name: str) -> None:
    """Stores read-only arrays; marks that equal their defaults become None."""
    fields: dict[str, object] = {"ranges": ranges, "name": name}
    for what, values in marks._asdict().items():
        default = values is None or np.array_equal(values, DEFAULTS[what](len(ranges)))
        fields[what] = None if default else values
    for what, value in fields.items():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        object.__setattr__(mask, what, value)


def _combine(
    left: Mask, symbol: str, right: Mask, operator: Callable[[Int32, Int32], Int32]
) -> Mask:
    if left.length != right.length:
        raise ValueError(
            f"masks of different lengths cannot be combined: {left.name!r} has {left.length} "
            f"tokens and {right.name!r} has {right.length}"
        )
    names = (f"({mask.name})" if " " in mask.name else mask.name for mask in (left, right))
    marks = positions_and_targets((left, right))
    return normal_mask(operator(left.ranges, right.ranges), marks, f" {symbol} ".join(names))


def _check_distances(mask: Mask, window: Mask) -> None:
    """Refuses a sliding window, which counts rows, over a mask whose tokens attend keys at a
    different distance in positions. A question and its second answer are an example."""
    if window.name != ROW_WINDOW or window.positions is not None or mask.positions is None:
        return
    if mask.length == window.length and _attends_other_runs(mask.ranges, mask.positions):
        raise ValueError(
            f"sliding_window counts rows, but in {mask.name!r} positions differ from rows, so the "
            "window would leave out nearby tokens; use "
            f"masks.within(masks.{mask.name}, window=...), which counts positions"
        )


def _attends_other_runs(ranges: Int32, positions: Int32) -> bool:
    """Whether a token attends a key whose distance in rows differs from that in positions."""
    shift = np.arange(len(positions)) - positions
    for start, end in ranges.transpose(1, 2, 0):
        given = start < end
        ends = np.stack([start[given], end[given] - 1])
        if (shift[ends] != shift[given]).any():
            return True
    return False


def positions_and_targets(masks: Iterable[Mask]) -> Marks:
    """Positions, targets, branches and weights of one sequence with several masks. Masks that set
    the same property must agree; None stands for the default."""
    marks = NO_MARKS
    for mask in masks:
        pairs = zip(Marks._fields, marks, mask.marks, strict=True)
        marks = Marks(*(_agreed(what, *pair) for what, *pair in pairs))
    return marks


def _agreed(what: str, left: Int32 | None, right: Int32 | None) -> Int32 | None:
    if left is None or right is None:
        return right if left is None else left
    if left.shape != right.shape:
        raise ValueError(f"two masks disagree about {what}: only one of them may set {what}")
    if not np.array_equal(left, right):
        token = int(np.argmax((left != right).reshape(len(left), -1).any(axis=1)))
        raise ValueError(
            f"two masks disagree about {what}: token {token} has {left[token]} in one and "
            f"{right[token]} in the other; let only one of them set {what}, or make them equal"
        )
    return left


def default_positions(length: int) -> Int32:
    """0, 1, ..., length-1."""
    return np.arange(length, dtype=np.int32)


def default_targets(length: int) -> Int32:
    """1, 2, ..., length-1, -1."""
    targets = np.arange(1, length + 1, dtype=np.int32)
    targets[-1] = -1
    return targets


DEFAULTS: dict[str, Callable[[int], Int32]] = {
    "positions": default_positions,
    "targets": default_targets,
    "branches": lambda _: np.empty((0, 2), np.int32),
    "weights": lambda length: np.ones(length, np.int32),
}


def _checked_ranges(name: str, given: npt.ArrayLike) -> Int32:
    """Checks a user's ranges and returns them in normal form (see `Mask`)."""
    ranges = _integers(name, "ranges", given)
    if ranges.ndim != 3 or ranges.shape[2] != 2 or 0 in ranges.shape:
        raise ValueError(
            f"mask {name!r}: ranges have shape {ranges.shape}; they must have shape "
            "[tokens, R, 2] with at least one token and one range per token"
        )
    length = ranges.shape[0]
    starts, ends = ranges[:, :, 0], ranges[:, :, 1]
    filled = starts < ends
    reached = np.maximum.accumulate(np.where(filled, ends, 0), axis=1)
    reached = np.pad(reached, ((0, 0), (1, 0)))[:, :-1]  # largest end of the token's earlier ranges
    faults = {
        "runs backwards; start must be at most end": starts > ends,
        f"leaves the sequence; it must be inside [0, {length})": (starts < 0) | (ends > length),
        "overlaps or comes before an earlier range of that token; ranges must be sorted and "
        "disjoint (use | to unite masks)": filled & (starts < reached),
    }
    for fault, wrong in faults.items():
        if wrong.any():
            token, column = (int(index) for index in np.argwhere(wrong)[0])
            start, end = ranges[token, column]
            raise ValueError(
                f"mask {name!r}: range {column} of token {token} is [{start}, {end}), which {fault}"
            )
    return merge(*columns(ranges))


def _checked_marks(name: str, given: Marks, length: int) -> Marks:
    """Checked copies of a user's marks."""
    positions = _per_token(name, "positions", given.positions, length, (0, LARGEST))
    targets = _per_token(name, "targets", given.targets, length, (-1, length - 1))
    weights = _per_token(name, "weights", given.weights, length, (0, LARGEST))
    resolved = default_targets(length) if targets is None else targets
    return Marks(positions, targets, _checked_branches(name, given.branches, resolved), weights)


def _per_token(
    name: str, what: str, given: npt.ArrayLike | None, length: int, limits: tuple[int, int]
) -> Int32 | None:
    if given is None:
        return None
    values = _integers(name, what, given)
    if values.shape != (length,):
        raise ValueError(
            f"mask {name!r}: {what} have shape {values.shape}; they must have shape ({length},), "
            "one value per token"
        )
    outside = (values < limits[0]) | (values > limits[1])
    if outside.any():
        token = int(np.argmax(outside))
        least = "-1 (no target) or 0" if limits[0] < 0 else "0"
        raise ValueError(
            f"mask {name!r}: {what}[{token}] is {values[token]}; it must be {least} to {limits[1]}"
        )
    return values.astype(np.int32)


def _checked_branches(name: str, given: npt.ArrayLike | None, targets: Int32) -> Int32 | None:
    """A user's branches, checked and sorted; None if there are none."""
    if given is None or np.size(given) == 0:
        return None
    pairs = _integers(name, "branches", given)
    length = len(targets)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.min() < 0 or pairs.max() >= length:
        raise ValueError(
            f"mask {name!r}: branches have shape {pairs.shape} and values {pairs.min()} to "
            f"{pairs.max()}; they must have shape [n, 2], one (token, target) pair per row, with "
            f"indices of the {length} tokens"
        )
    ordered = np.unique(pairs, axis=0).astype(np.int32)
    if len(ordered) != len(pairs) or (targets[ordered[:, 0]] >= 0).any():
        raise ValueError(
            f"mask {name!r}: a token with branches must list each of its targets there once, and "
            "have -1 in targets"
        )
    return ordered


def _integers(name: str, what: str, given: npt.ArrayLike) -> AnyInts:
    values = np.asarray(given)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"mask {name!r}: {what} have dtype {values.dtype}; they must be integers")
    return values


def intersect(left: Int32, right: Int32) -> Int32:
    """Intersection of two normal `[tokens, R, 2]` arrays: of every range with every other.

    [0, 4) [6, 9)  and  [2, 7)  ->  [2, 4) [6, 7)
    """
    a, b = columns(left), columns(right)
    starts = np.maximum(a[0][:, None], b[0]).reshape(-1, len(left))
    ends = np.minimum(a[1][:, None], b[1]).reshape(-1, len(left))
    return merge(starts, ends)


def unite(left: Int32, right: Int32) -> Int32:
    """Union of two normal `[tokens, R, 2]` arrays.

    [0, 4) [6, 9)  or  [3, 5)  ->  [0, 5) [6, 9)
    """
    starts, ends = np.concatenate([columns(left), columns(right)], axis=1)
    return merge(starts, ends)


def columns(ranges: AnyInts) -> Int32:
    """`[tokens, R, 2]` as starts and ends, `[2, R, tokens]`."""
    return np.array(ranges.T, np.int32, order="C")


def merge(starts: Int32, ends: Int32) -> Int32:
    """Ranges in any order as normal ranges `int32[tokens, R, 2]`. Ranges with start >= end are
    ignored. Columns that are empty for all tokens are dropped, except that one always remains.

    [3, 5) [0, 4) [6, 9) [8, 8)  ->  [0, 5) [6, 9)
    """
    num_ranges, length = starts.shape
    ranges = np.empty((length, num_ranges, 2), np.int32)
    most = max(_merge(starts, ends, ranges), 1)
    return ranges if most == num_ranges else ranges[:, :most].copy()


@compiled
def _merge(starts: Int32, ends: Int32, ranges: Int32) -> int:
    """Fills `ranges` and returns the largest number of ranges of any token."""
    num_ranges, length = starts.shape
    most = 0
    for token in range(length):
        count = _sort_ranges(starts, ends, ranges, token)
        kept = min(count, 1)
        for column in range(1, count):
            start, end = ranges[token, column, 0], ranges[token, column, 1]
            if start <= ranges[token, kept - 1, 1]:
                ranges[token, kept - 1, 1] = max(end, ranges[token, kept - 1, 1])
            else:
                ranges[token, kept, 0], ranges[token, kept, 1] = start, end
                kept += 1
        for column in range(kept, num_ranges):
            ranges[token, column, 0] = ranges[token, column, 1] = length
        most = max(most, kept)
    return most


@inner
def _sort_ranges(starts: Int32, ends: Int32, ranges: Int32, token: int) -> int:
    """Writes a token's non-empty ranges to `ranges`, sorted by start, and returns their number.
    An insertion sort: the input is usually sorted already, or two sorted lists."""
    count = 0
    for column in range(len(starts)):
        start, end = starts[column, token], ends[column, token]
        if start < end:
            place = count
            while place > 0 and ranges[token, place - 1, 0] > start:
                ranges[token, place, 0] = ranges[token, place - 1, 0]
                ranges[token, place, 1] = ranges[token, place - 1, 1]
                place -= 1
            ranges[token, place, 0], ranges[token, place, 1] = start, end
            count += 1
    return count
