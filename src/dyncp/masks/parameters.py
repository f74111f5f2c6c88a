"""Checks on the parameters of the named masks."""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt


def at_least(mask: str, parameter: str, value: object, minimum: int) -> int:
    """`value` as an int, if it is one and not below `minimum`."""
    number = whole(mask, parameter, value)
    if number < minimum:
        raise ValueError(f"masks.{mask}: {parameter} is {number}; allowed is at least {minimum}")
    return number


def between(mask: str, parameter: str, value: object, low: int, high: int) -> int:
    """`value` as an int, if it is one and in `low`..`high`."""
    number = whole(mask, parameter, value)
    if not low <= number <= high:
        raise ValueError(f"masks.{mask}: {parameter} is {number}; allowed is {low} to {high}")
    return number


def whole(mask: str, parameter: str, value: object) -> int:
    """`value` as an int."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"masks.{mask}: {parameter} is {value!r}; allowed is a whole number"
        ) from None


def lengths_of(mask: str, parameter: str, value: object) -> npt.NDArray[np.int64]:
    """`value` as a list of lengths, none of them negative."""
    lengths = np.asarray(value)
    if lengths.ndim != 1 or len(lengths) == 0 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(
            f"masks.{mask}: {parameter} is {value!r}; allowed is a list of whole numbers"
        )
    if lengths.min() < 0:
        index = int(np.argmax(lengths < 0))
        raise ValueError(
            f"masks.{mask}: {parameter}[{index}] is {lengths[index]}; allowed is at least 0"
        )
    return lengths.astype(np.int64)
