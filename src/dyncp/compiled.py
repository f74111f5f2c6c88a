"""How loops are compiled.

Most of a cold start is compiling. Functions that only other compiled ones call get no wrappers for
Python and are kept in their callers' caches; dividing by zero gives infinity rather than a check
and an exception.

What was compiled is kept on disk, where there is room: beside the code, in the user's cache folder,
or in NUMBA_CACHE_DIR. Where there is none, every process compiles anew.
"""

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numba

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that Python calls."""
    made: Any = numba.njit(**OPTIONS)(function)
    try:
        made.enable_caching()
    except (RuntimeError, OSError) as error:  # nowhere to write
        _warn_once(str(error))
    else:
        made._cache.save_overload = _saving_where_possible(made._cache.save_overload)
    kept: Callable[P, R] = made
    return kept


def _saving_where_possible(save: Callable[..., None]) -> Callable[..., None]:
    def save_or_warn(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:  # a full disk, as a rule
            _warn_once(str(error))

    return save_or_warn


_told: list[str] = []


def _warn_once(reason: str) -> None:
    """Every function has the same reason, in other words."""
    if not _told:
        logger.warning(
            "compiled code is not kept (%s): every process compiles anew; NUMBA_CACHE_DIR names "
            "another folder",
            reason,
        )
    _told.append(reason)


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that only compiled ones call."""
    made: Callable[P, R] = numba.njit(**OPTIONS, **NO_WRAPPERS)(function)
    return made
