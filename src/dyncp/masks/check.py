"""Checks on what a user hands to `Mask`, each with a sentence; and the normal form of ranges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dyncp.masks.compose import IntArray, columns, merge

AnyInts = npt.NDArray[np.integer]


def normal_ranges(name: str, given: npt.ArrayLike) -> IntArray:
    """Checked, merged and read-only copy of user ranges (see `Mask` for the normal form)."""
    ranges = _integers(name, "ranges", given)
    if ranges.ndim != 3 or ranges.shape[2] != 2 or 0 in ranges.shape:
        raise ValueError(
            f"mask {name!r}: ranges have shape {ranges.shape}; allowed is [tokens, R, 2] with at "
            "least one token and one range per token"
        )
    length = ranges.shape[0]
    starts, ends = ranges[:, :, 0], ranges[:, :, 1]
    _refuse(name, ranges, starts > ends, "runs backwards; allowed is start <= end")
    outside = (starts < 0) | (ends > length)
    _refuse(name, ranges, outside, f"leaves the sequence; allowed is 0 <= start, end <= {length}")
    _refuse_disorder(name, ranges)
    return frozen(merge(*columns(ranges)))


def _refuse_disorder(name: str, ranges: AnyInts) -> None:
    """Every range has to start at or behind the end of those before it; empty ones do not count."""
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


def normal_positions(name: str, given: npt.ArrayLike | None, length: int) -> IntArray | None:
    """Checked read-only copy; None where they are 0..tokens-1."""
    if given is None:
        return None
    positions = _one_per_token(name, "positions", given, length)
    if positions.min() < 0 or positions.max() > np.iinfo(np.int32).max:
        token = int(np.argmax((positions < 0) | (positions > np.iinfo(np.int32).max)))
        raise ValueError(
            f"mask {name!r}: positions[{token}] is {positions[token]}; allowed are 0 to 2^31 - 1"
        )
    if np.array_equal(positions, default_positions(length)):
        return None
    return frozen(positions.astype(np.int32))


def normal_targets(name: str, given: npt.ArrayLike | None, length: int) -> IntArray | None:
    """Checked read-only copy; None where every token's target is the next one in memory."""
    if given is None:
        return None
    targets = _one_per_token(name, "targets", given, length)
    outside = (targets < -1) | (targets >= length)
    if outside.any():
        token = int(np.argmax(outside))
        raise ValueError(
            f"mask {name!r}: targets[{token}] is {targets[token]}; allowed is the index of a "
            f"token, 0 to {length - 1}, or -1 for none"
        )
    if np.array_equal(targets, default_targets(length)):
        return None
    return frozen(targets.astype(np.int32))


def default_positions(length: int) -> IntArray:
    """0, 1, ..., length-1."""
    return np.arange(length, dtype=np.int32)


def default_targets(length: int) -> IntArray:
    """1, 2, ..., length-1, -1."""
    targets = np.arange(1, length + 1, dtype=np.int32)
    targets[-1] = -1
    return targets


def frozen(array: IntArray) -> IntArray:
    """The same array, read-only from now on."""
    array.flags.writeable = False
    return array


def _one_per_token(name: str, what: str, given: npt.ArrayLike, length: int) -> AnyInts:
    values = _integers(name, what, given)
    if values.shape != (length,):
        raise ValueError(
            f"mask {name!r}: {what} have shape {values.shape}; allowed is ({length},), one for "
            "every token"
        )
    return values


def _integers(name: str, what: str, given: npt.ArrayLike) -> AnyInts:
    values = np.asarray(given)
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"mask {name!r}: {what} have dtype {values.dtype}; allowed is any integer dtype"
        )
    return values
