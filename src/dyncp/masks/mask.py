"""`Mask`: which keys every query token of one sequence may attend, and the interval arithmetic on
key ranges behind `&`, `|` and the named masks.

That works on arrays `starts` and `ends` of shape `[R, tokens]` (a column has the ranges of one
token), for all tokens at once. Empty ranges come last in results, as `(length, length)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32
from dyncp.compiled import compiled, inner
from dyncp.masks.pairs import draw_mask

AnyInts = npt.NDArray[np.integer]
ROW_WINDOW = "sliding_window"  # the mask that counts rows
RangeOperator = Callable[[Int32, Int32], Int32]


class Marks(NamedTuple):
    """What a mask says of tokens: see `Mask`; None is the default."""

    positions: Int32 | None = None
    targets: Int32 | None = None
    branches: Int32 | None = None
    weights: Int32 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """For every query token of a sequence, the half-open key ranges it may attend.

    `ranges` is `int32[tokens, R, 2]`. Token 3 below attends keys 0, 2 and 3:

        Mask([[[0, 1], [4, 4]],     1 . . .
              [[0, 2], [4, 4]],     1 1 . .
              [[1, 3], [4, 4]],     . 1 1 .
              [[0, 1], [2, 4]]])    1 . 1 1

    `positions` (`int32[tokens]`) is each token's position in its text; None means 0..tokens-1.
    `targets` (`int32[tokens]`) is the index of the token each one has to predict, -1 for none; None
    means the next one in memory, and none for the last. `branches` (`int32[n, 2]`) lists (token,
    target) for tokens that have several targets; their entry in `targets` is -1. `weights`
    (`int32[tokens]`) is how often each token counts as a target; None means once.

    Normal form: the ranges of a token are sorted, disjoint and do not touch (touching ones are
    merged); empty ranges come last, as (tokens, tokens); a column that is empty for all tokens is
    dropped unless it is the only one; branches are sorted; defaults become None. So masks that
    allow the same pairs have the same arrays. The arrays are read-only copies. Masks are equal when
    their arrays are; names do not count.
    """

    ranges: Int32
    positions: Int32 | None = None
    targets: Int32 | None = None
    name: str = "mask"
    branches: Int32 | None = None
    weights: Int32 | None = None
    _digest: bytes | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "ranges", _normal_ranges(self.name, self.ranges))
        set_field(self, "positions", _normal_positions(self.name, self.positions, self.length))
        set_field(self, "targets", _normal_targets(self.name, self.targets, self.length))
        set_field(self, "branches", _normal_branches(self.name, self.branches, self.targets))
        set_field(self, "weights", _normal_weights(self.name, self.weights, self.length))
        if self.branches is not None and self.branches.max() >= self.length:
            raise ValueError(
                f"mask {self.name!r}: branches reach token {self.branches.max()}; the sequence "
                f"has {self.length} tokens"
            )

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return int(self.ranges.shape[0])

    @property
    def num_pairs(self) -> int:
        """Number of allowed (query, key) pairs."""
        starts, ends = self.ranges[:, :, 0], self.ranges[:, :, 1]
        return int(ends.sum(dtype=np.int64)) - int(starts.sum(dtype=np.int64))

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for length, ranges, positions and targets."""
        if self._digest is None:
            object.__setattr__(self, "_digest", _digest(self))
        assert self._digest is not None
        return self._digest

    def resolved_positions(self) -> Int32:
        """Positions as an array, also where they are the default."""
        return default_positions(self.length) if self.positions is None else self.positions

    def resolved_targets(self) -> Int32:
        """Targets as an array, also where they are the default."""
        return default_targets(self.length) if self.targets is None else self.targets

    @property
    def marks(self) -> Marks:
        """All that the mask says of tokens, besides which keys they attend."""
        return Marks(self.positions, self.targets, self.branches, self.weights)

    def dense(self) -> npt.NDArray[np.bool_]:
        """`bool[tokens, tokens]`, true where query (row) may attend key (column)."""
        keys = np.arange(self.length, dtype=np.int32)
        allowed = np.zeros((self.length, self.length), np.bool_)
        for column in range(self.ranges.shape[1]):
            start, end = self.ranges[:, column, :1], self.ranges[:, column, 1:]
            allowed |= (keys >= start) & (keys < end)
        return allowed

    def draw(self, width: int = 64) -> str:
        """The mask as text, at most `width` cells wide and high, under a line with its numbers."""
        return draw_mask(self, width)

    def __and__(self, other: Mask) -> Mask:
        """Pairs that both masks allow."""
        return _combine(self, other, "&", intersect) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        """Pairs that at least one of the masks allows."""
        return _combine(self, other, "|", unite) if isinstance(other, Mask) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return np.array_equal(self.ranges, other.ranges) and all(
            map(_same, self.marks, other.marks)
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Mask {self.name}: {self.length} tokens, {self.num_pairs} pairs>"

    def __reduce__(self) -> tuple[object, ...]:
        return normal_mask, (self.ranges, *self.marks, self.name)


def normal_mask(
    ranges: Int32,
    positions: Int32 | None = None,
    targets: Int32 | None = None,
    branches: Int32 | None = None,
    weights: Int32 | None = None,
    name: str = "mask",
) -> Mask:
    """A mask of arrays already in normal form; takes them over without checks or copies."""
    mask = object.__new__(Mask)
    set_field = object.__setattr__
    set_field(mask, "ranges", read_only(ranges))
    for field_name, values in zip(
        Marks._fields, (positions, targets, branches, weights), strict=True
    ):
        set_field(mask, field_name, None if values is None else read_only(values))
    set_field(mask, "name", name)
    set_field(mask, "_digest", None)
    return mask


def packed_mask(
    ranges: Int32,
    positions: Int32,
    targets: Int32,
    name: str,
    branches: Int32 | None = None,
    weights: Int32 | None = None,
) -> Mask:
    """`normal_mask`, but positions and targets may be the default ones."""
    length = len(ranges)
    default = (positions == default_positions(length)).all()
    next_in_memory = (targets == default_targets(length)).all()
    return normal_mask(
        ranges,
        None if default else positions,
        None if next_in_memory else targets,
        branches,
        weights,
        name,
    )


def _combine(left: Mask, right: Mask, symbol: str, operator: RangeOperator) -> Mask:
    if symbol == "&":
        _check_distances(left, right)
        _check_distances(right, left)
    if left.length != right.length:
        raise ValueError(
            f"masks of different lengths cannot be combined: {left.name!r} has {left.length} "
            f"tokens and {right.name!r} has {right.length}"
        )
    pairs = zip(Marks._fields, left.marks, right.marks, strict=True)
    marks = Marks(*(agree(what, *pair) for what, *pair in pairs))
    name = f"{_bracketed(left.name)} {symbol} {_bracketed(right.name)}"
    return normal_mask(operator(left.ranges, right.ranges), *marks, name)


def _check_distances(mask: Mask, window: Mask) -> None:
    """Refuses a window of rows over a mask that sets positions which differ from rows where it
    matters, as between a question and its second answer."""
    if window.name != ROW_WINDOW or window.positions is not None or mask.positions is None:
        return
    if mask.length == window.length and reach_other_runs(mask.ranges, mask.positions):
        raise ValueError(
            f"sliding_window counts rows, and {mask.name!r} has tokens whose positions are not "
            "their rows: the window would leave out what is near; use "
            f"masks.within(masks.{mask.name}, window=...), which counts positions"
        )


def _bracketed(name: str) -> str:
    return f"({name})" if " " in name else name


def _same(left: Int32 | None, right: Int32 | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right)


def _digest(mask: Mask) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    state.update(np.array(mask.ranges.shape, "<i8").tobytes())
    state.update(np.ascontiguousarray(mask.ranges, "<i4").data)
    for values in mask.marks:
        state.update(b"default" if values is None else b"given")
        if values is not None:
            state.update(np.ascontiguousarray(values, "<i4").data)
    return state.digest()


def _normal_ranges(name: str, given: npt.ArrayLike) -> Int32:
    """Checked, merged and read-only copy of user ranges (see `Mask` for the normal form)."""
    ranges = _integers(name, "ranges", given)
    if ranges.ndim != 3 or ranges.shape[2] != 2 or 0 in ranges.shape:
        raise ValueError(
            f"mask {name!r}: ranges have shape {ranges.shape}; they must have shape "
            "[tokens, R, 2] with at least one token and one range per token"
        )
    length = ranges.shape[0]
    starts, ends = ranges[:, :, 0], ranges[:, :, 1]
    _refuse(name, ranges, starts > ends, "runs backwards; allowed is start <= end")
    outside = (starts < 0) | (ends > length)
    _refuse(name, ranges, outside, f"leaves the sequence; allowed is 0 <= start, end <= {length}")
    _refuse_disorder(name, ranges)
    return read_only(merge(*columns(ranges)))


def _refuse_disorder(name: str, ranges: AnyInts) -> None:
    """Every range must start at or after the end of those before it; empty ones do not count."""
    if ranges.shape[1] == 1:
        return
    starts, ends = ranges[:, :, 0], ranges[:, :, 1]
    filled = starts < ends
    reached = np.maximum.accumulate(np.where(filled, ends, 0), axis=1)
    disorder = np.zeros_like(filled)
    disorder[:, 1:] = filled[:, 1:] & (starts[:, 1:] < reached[:, :-1])
    _refuse(
        name,
        ranges,
        disorder,
        "overlaps or comes before an earlier range of that token; allowed are sorted, disjoint "
        "ranges (to unite masks use |)",
    )


def _refuse(name: str, ranges: AnyInts, wrong: npt.NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        token, column = (int(index) for index in np.argwhere(wrong)[0])
        start, end = ranges[token, column]
        raise ValueError(
            f"mask {name!r}: range {column} of token {token} is [{start}, {end}), which {why}"
        )


def _normal_positions(name: str, given: npt.ArrayLike | None, length: int) -> Int32 | None:
    most = np.iinfo(np.int32).max
    default = default_positions(length)
    return _per_token(name, "positions", given, default, (0, most), "0 to 2^31 - 1")


def _normal_targets(name: str, given: npt.ArrayLike | None, length: int) -> Int32 | None:
    allowed = f"the index of a token, 0 to {length - 1}, or -1 for none"
    return _per_token(name, "targets", given, default_targets(length), (-1, length - 1), allowed)


def _normal_branches(name: str, given: npt.ArrayLike | None, targets: Int32 | None) -> Int32 | None:
    """Sorted, without repetitions; `targets` are normal."""
    if given is None or np.size(given) == 0:
        return None
    pairs = _integers(name, "branches", given)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.min() < 0:
        raise ValueError(
            f"mask {name!r}: branches have shape {pairs.shape} and values from {pairs.min()} on; "
            "they must have shape [n, 2], (token, target) each, with indices from 0 on"
        )
    ordered = np.unique(pairs, axis=0).astype(np.int32)
    tokens = ordered[:, 0]
    single = targets is None or tokens.max() >= len(targets) or (targets[tokens] >= 0).any()
    if single or len(ordered) != len(pairs):
        raise ValueError(
            f"mask {name!r}: tokens with branches have all their targets there, each once, and -1 "
            "in targets"
        )
    return read_only(ordered)


def _normal_weights(name: str, given: npt.ArrayLike | None, length: int) -> Int32 | None:
    most = np.iinfo(np.int32).max
    once = np.ones(length, np.int32)
    return _per_token(name, "weights", given, once, (0, most), "0 to 2^31 - 1")


def _per_token(
    name: str,
    what: str,
    given: npt.ArrayLike | None,
    default: Int32,
    limits: tuple[int, int],
    allowed: str,
) -> Int32 | None:
    """Checked read-only copy; None where the values are the default ones."""
    if given is None:
        return None
    values = _integers(name, what, given)
    if values.shape != default.shape:
        raise ValueError(
            f"mask {name!r}: {what} have shape {values.shape}; they must have shape "
            f"({len(default)},), one for every token"
        )
    outside = (values < limits[0]) | (values > limits[1])
    if outside.any():
        token = int(np.argmax(outside))
        raise ValueError(f"mask {name!r}: {what}[{token}] is {values[token]}; allowed is {allowed}")
    return None if np.array_equal(values, default) else read_only(values.astype(np.int32))


def default_positions(length: int) -> Int32:
    """0, 1, ..., length-1."""
    return np.arange(length, dtype=np.int32)


def default_targets(length: int) -> Int32:
    """1, 2, ..., length-1, -1."""
    targets = np.arange(1, length + 1, dtype=np.int32)
    targets[-1] = -1
    return targets


def read_only(array: Int32) -> Int32:
    """The same array, read-only from now on."""
    array.flags.writeable = False
    return array


def _integers(name: str, what: str, given: npt.ArrayLike) -> AnyInts:
    values = np.asarray(given)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"mask {name!r}: {what} have dtype {values.dtype}; they must be integers")
    return values


def cover(length: int, *intervals: tuple[npt.ArrayLike, npt.ArrayLike]) -> Int32:
    """Ranges that cover, for every token, the union of intervals (starts, ends) that may overlap.

    For tokens 0, 1, 2 of length 3, the sink [0, 1) and the window [i, i+1) give

        cover(3, (0, 1), (i, i + 1))  ->  [0, 1) -      touching and overlapping ones are merged
                                          [0, 2) -
                                          [0, 1) [2, 3)
    """
    starts, ends = np.empty((2, len(intervals), length), np.int32)
    for row, (start, end) in enumerate(intervals):
        starts[row] = start
        ends[row] = end
    return merge(starts, ends)


def intersect(left: Int32, right: Int32) -> Int32:
    """Intersection of two normal `[tokens, R, 2]` arrays: every range with every other.

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


def columns(ranges: npt.NDArray[np.integer]) -> Int32:
    """`[tokens, R, 2]` as starts and ends, `[2, R, tokens]`."""
    return np.array(ranges.T, np.int32, order="C")


def merge(starts: Int32, ends: Int32) -> Int32:
    """Normal ranges `int32[tokens, R, 2]` of ranges in any order; empty and backward ones do not
    count. Columns that are empty for every token are dropped; one always stays.

    [3, 5) [0, 4) [6, 9) [8, 8)  ->  [0, 5) [6, 9)
    """
    num_ranges, length = starts.shape
    ranges = np.empty((length, num_ranges, 2), np.int32)
    most = max(_merge(starts, ends, ranges), 1)
    return ranges if most == num_ranges else ranges[:, :most].copy()


@compiled
def _merge(starts: Int32, ends: Int32, ranges: Int32) -> int:
    """Fills `ranges`; gives the most ranges of a token."""
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
    """Sorts the non-empty ranges of a token by their starts; returns their number. Ranges are
    mostly sorted already, or two sorted lists."""
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


def agree(what: str, left: Int32 | None, right: Int32 | None) -> Int32 | None:
    """Positions or targets of two combined masks, of the one that sets them; both must agree."""
    if left is None or right is None:
        return right if left is None else left
    if left.shape != right.shape:
        raise ValueError(f"two masks disagree about {what}: only one of them may set {what}")
    if not np.array_equal(left, right):
        token = int(np.argmax((left != right).reshape(len(left), -1).any(axis=1)))
        raise ValueError(
            f"two masks disagree about {what}: token {token} has {left[token]} in one and "
            f"{right[token]} in the other; only one of them may set {what}, or both the same"
        )
    return left


@dataclass(frozen=True, eq=False)
class Runs:
    """Of every token: the first row after its run, and row − position in that run."""

    end: npt.NDArray[np.int64]
    shift: npt.NDArray[np.int64]

    @staticmethod
    def of(positions: Int32) -> Runs:
        length = len(positions)
        borders = np.flatnonzero(np.diff(positions) != 1) + 1
        ends = np.append(borders, length)
        number = np.searchsorted(borders, np.arange(length), side="right")
        shift = np.arange(length) - positions
        return Runs(ends[number].astype(np.int64), shift.astype(np.int64))


def reach_other_runs(ranges: Int32, positions: Int32) -> bool:
    """Whether a token attends keys whose distance in rows is not that in positions."""
    shift = Runs.of(positions).shift
    for column in range(ranges.shape[1]):
        start, end = ranges[:, column].T
        given = start < end
        ends = np.stack([start[given], end[given] - 1])
        if (shift[ends] != shift[given]).any():
            return True
    return False
