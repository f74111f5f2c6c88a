"""How loops are compiled.

Most of a cold start is compiling. Functions that only other compiled ones call get no wrappers for
Python and are kept in their callers' caches; dividing by zero gives infinity rather than a check
and an exception.

Compiled code is cached on disk if a folder is writable: next to the code, in the user's cache
folder, or in NUMBA_CACHE_DIR. Processes that start together take turns: one compiles a function,
the others wait and load it. Without such a folder every process compiles again.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba

try:
    import fcntl
except ImportError:  # not on Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
# Nobody calls compiled functions from C, and wrappers for that would take a tenth of the time.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
INNER: dict[str, Any] = {"no_cpython_wrapper": True}
# As long as another process may take for one function with all that it calls.
WAIT_SECONDS = 60.0


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that Python calls."""
    made: Any = _for_any_number(numba.njit(**OPTIONS)(function))
    try:
        made.enable_caching()
    except (RuntimeError, OSError) as error:  # nowhere to write
        _warn_once(str(error))
    else:
        made._cache.save_overload = _saving_where_possible(made._cache.save_overload)
        made._cache.load_overload = _loading_where_possible(made._cache)
        made.compile = _taking_turns(made.compile, Path(made._cache.cache_path))
    kept: Callable[P, R] = made
    return kept


def _taking_turns(compile_: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def compile_alone(*arguments: Any) -> Any:
        with _turn(folder):
            return compile_(*arguments)  # loads what another process has compiled meanwhile

    return compile_alone


def is_compiled(function: Any) -> bool:
    """Whether the code of a `compiled` function is on disk; also where it cannot be kept."""
    path = getattr(function._cache, "cache_path", None)
    if path is None:
        return True
    code = function.py_func.__code__
    name = f"{Path(code.co_filename).stem}.{function.py_func.__qualname__}-{code.co_firstlineno}"
    return any(Path(path).glob(f"{name}.*.nbi"))


def take_task(function: Any, task: str) -> Any:
    """An open lock file that only one process per task and cache folder gets, to be closed when
    done; None for the others."""
    path = getattr(function._cache, "cache_path", None)
    if fcntl is None or path is None:
        return None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        lock = (Path(path) / f"{task}.lock").open("w")
    except OSError:  # nowhere to write
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


_turns = threading.RLock()  # compiling a function compiles those that it calls
_held: list[Path] = []


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Holds the folder's compile lock; gives up waiting for it after WAIT_SECONDS."""
    with _turns:
        if fcntl is None or _held:
            yield
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "compiling.lock").open("w")
        except OSError:  # nowhere to write
            yield
            return
        with lock:
            _held.append(folder)
            try:
                _wait_for(lock)
                yield
            finally:
                _held.clear()


def _wait_for(lock: Any) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file ends it
            return
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # no locks on this file system
            return


def _saving_where_possible(save: Callable[..., None]) -> Callable[..., None]:
    def save_or_warn(*arguments: Any) -> None:
        try:
            save(*arguments)
        except OSError as error:  # a full disk, as a rule
            _warn_once(str(error))

    return save_or_warn


def _loading_where_possible(cache: Any) -> Callable[..., Any]:
    """An index of an older version may name classes that are gone: its functions compile again."""
    load = cache.load_overload

    def load_or_forget(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except (AttributeError, ImportError) as error:
            logger.debug("%s: compiled again, since its cache is of another version", error)
            cache.flush()
            return None

    return load_or_forget


_told: list[str] = []


def _warn_once(reason: str) -> None:
    """The reason is the same for every function."""
    if not _told:
        logger.warning(
            "cannot cache compiled code (%s), so every process compiles it again; set "
            "NUMBA_CACHE_DIR to a writable folder",
            reason,
        )
    _told.append(reason)


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that only compiled ones call."""
    made: Callable[P, R] = _for_any_number(numba.njit(**OPTIONS, **INNER)(function))
    return made


def _for_any_number(made: Any) -> Any:
    """Compiles once for all integer values; numba would compile again for each literal that a
    caller writes."""
    template = made.get_call_template
    any_of: Callable[[Any], Any] = numba.types.unliteral

    def without_literals(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        known = {name: any_of(kind) for name, kind in keywords.items()}
        return template(tuple(map(any_of, arguments)), known)

    made.get_call_template = without_literals
    return made
