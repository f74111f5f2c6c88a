"""How the solver's loops are compiled.

Most of a cold start is compiling. Functions that only other compiled ones call get no wrappers for
Python and are kept in their callers' caches; dividing by zero gives infinity rather than a check
and an exception; and arguments that start as constants (`best = -1`) do not get versions of their
own, of which there were 1.5 per function.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba
from numba import types

P = ParamSpec("P")
R = TypeVar("R")
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that Python calls."""
    made: Callable[P, R] = _without_constants(numba.njit(cache=True, **OPTIONS)(function))
    return made


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that only compiled ones call."""
    made: Callable[P, R] = _without_constants(numba.njit(**OPTIONS, **NO_WRAPPERS)(function))
    return made


def _without_constants(dispatcher: Any) -> Any:
    """Compiles for the types of constant arguments, not for their values."""
    find, type_of = dispatcher.get_call_template, types.unliteral

    def find_template(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        return find(tuple(map(type_of, args)), kws)

    dispatcher.get_call_template = find_template
    return dispatcher
