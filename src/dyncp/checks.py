"""Checks of what users give: a sentence instead of a TypeError somewhere inside."""

import json
import operator
from typing import Any

MOST_TOKENS = 2**31 - 1  # of a batch: rows and key ranges are int32
MOST_RANKS = 2**16  # of a plan; also the most rows that a multiple or an alignment may have


def whole_number(name: str, value: Any, least: int, most: int = MOST_TOKENS) -> int:
    """`value` as an int; numpy's integers are allowed, bools are not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(
            f"{name} is {value!r}; a whole number is needed, at least {least}"
        ) from None
    if number < least:
        raise ValueError(f"{name} is {number}; at least {least} is needed")
    if number > most:
        raise ValueError(f"{name} is {number}; at most {most:,} is allowed")
    return number


def finite_number(name: str, value: Any) -> float:
    """`value` as a float that is neither NaN nor infinite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise ValueError(f"{name} is {value!r}; a finite number is needed")
    return number


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; ValueError also where it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def instance_of(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raises ValueError unless `value` is of one of these types, which `expected` names."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is {type(value).__name__}; expected {expected}")
