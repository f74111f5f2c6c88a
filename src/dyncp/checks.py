"""Checks of user input, which raise a ValueError with a clear sentence; and the number of cores."""

import json
import operator
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

MOST_TOKENS = 2**31 - 1  # in a batch: rows and key ranges are int32
MOST_RANKS = 2**16  # in a plan; also the largest multiple or alignment of rows


def whole_number(name: str, value: Any, least: int, most: int = MOST_TOKENS) -> int:
    """`value` as an int; numpy integers are allowed, bools are not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; expected an integer, at least {least}") from None
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


def one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON; raises ValueError also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_file(what: str, path: Path) -> Any:
    """The content of a JSON file. A ValueError names `what` the file is and its path."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{what} {path} is not JSON: {error}") from error


def usable_cores() -> int:
    """Number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def instance_of(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raises ValueError unless `value` has one of these types; `expected` describes them."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is {type(value).__name__}; expected {expected}")
