"""How loops are compiled.

Most of a cold start is compiling. Functions that only other compiled ones call get no wrappers for
Python and are kept in their callers' caches; dividing by zero gives infinity rather than a check
and an exception.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that Python calls."""
    made: Callable[P, R] = numba.njit(cache=True, **OPTIONS)(function)
    return made


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that only compiled ones call."""
    made: Callable[P, R] = numba.njit(**OPTIONS, **NO_WRAPPERS)(function)
    return made
