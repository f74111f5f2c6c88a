"""Decorators that compile loops with numba.

A cold start spends most of its time compiling. To save time, functions that only compiled functions
call (`inner`) get no Python wrappers and are cached with their callers, and division by zero gives
infinity without a check.

Compiled code is cached on disk if one of these folders is writable: next to the code, the user's
cache folder, or NUMBA_CACHE_DIR. If several processes need the same function, one compiles it, and
the others wait and load it. Without a writable folder, every process compiles again.

Files of the cache have checksums: one that is empty, cut off or damaged is replaced by compiling
again, and the log says so once.
"""

import logging
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core.caching import IndexDataCacheFile

try:
    import fcntl
except ImportError:  # not on Windows: every process compiles for itself
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_all: list[Any] = []  # all `compiled` functions
P = ParamSpec("P")
R = TypeVar("R")
# Wrappers for calls from C are not needed and would take a tenth of the compile time.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
INNER: dict[str, Any] = {"no_cpython_wrapper": True}
_FILES: Any = IndexDataCacheFile  # numba has no types
# Longest time that another process may take for one function and its callees.
WAIT_SECONDS = 60.0


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for functions that are called from Python."""
    made: Any = _for_any_number(numba.njit(**OPTIONS)(function))
    _all.append(made)
    try:
        made.enable_caching()
    except (RuntimeError, OSError) as error:  # no writable folder
        _warn_once(str(error))
    else:
        made._cache._cache_file = CheckedFiles(made._cache)
        made._cache.save_overload = _saving_where_possible(made._cache.save_overload)
        made._cache.load_overload = _loading_where_possible(made._cache)
        made.compile = _taking_turns(made.compile, Path(made._cache.cache_path))
    kept: Callable[P, R] = made
    return kept


def _taking_turns(compile_: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    def compile_alone(*arguments: Any) -> Any:
        with _turn(folder):
            return compile_(*arguments)  # loads the code if another process has compiled it

    return compile_alone


def is_compiled(function: Any) -> bool:
    """Whether the code of a `compiled` function is on disk. True if it cannot be cached."""
    path = getattr(function._cache, "cache_path", None)
    if path is None:
        return True
    code = function.py_func.__code__
    name = f"{Path(code.co_filename).stem}.{function.py_func.__qualname__}-{code.co_firstlineno}"
    return any(Path(path).glob(f"{name}.*.nbi"))


def count_compiled() -> int:
    """Number of `compiled` functions whose code is on disk."""
    return sum(is_compiled(function) for function in _all)


def take_task(function: Any, task: str) -> Any:
    """An open lock file that one process per task and cache folder gets, and closes when done; None
    for all other processes."""
    path = getattr(function._cache, "cache_path", None)
    lock = None if path is None else _open_lock(Path(path), task)
    if lock is None:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def _open_lock(folder: Path, name: str) -> Any:
    """A lock file in this folder; None without locks or if the folder is not writable."""
    if fcntl is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"{name}.lock").open("w")
    except OSError:
        return None


_turns = threading.RLock()  # reentrant: compiling a function also compiles its callees
_held: list[Path] = []  # the folder whose lock this process holds


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Holds the folder's compile lock; gives up waiting for it after WAIT_SECONDS."""
    with _turns:
        lock = None if _held else _open_lock(folder, "compiling")
        if lock is None:
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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file releases it
            return
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # no locks on this file system
            return


def _saving_where_possible(save: Callable[..., None]) -> Callable[..., None]:
    def save_or_warn(*arguments: Any) -> None:
        try:
            save(*arguments)
        except Exception as error:  # a full disk, or files that cannot be read or replaced
            _warn_once(str(error) or type(error).__name__)

    return save_or_warn


def _loading_where_possible(cache: Any) -> Callable[..., Any]:
    """Loads cached code. Functions are compiled again if their files are damaged, or name classes
    of an older version that no longer exist."""
    load = cache.load_overload

    def load_or_forget(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except (AttributeError, ImportError) as error:
            logger.debug("%s: compiled again, since its cache is of another version", error)
        except Exception as error:  # pickle raises any error for damaged files
            _warn_of_damage(cache, error)
        with suppress(OSError):  # otherwise `save_overload` warns
            cache.flush()
        return None

    return load_or_forget


class CheckedFiles(_FILES):  # type: ignore[misc]
    """The files of one function's cache, with a checksum at the end of each: after a crash or on a
    broken disk, machine code may be damaged in a file that can still be read. Code is stored with
    its key, because numba writes the index first: if a process dies then, the index names a file
    with other code."""

    def __init__(self, cache: Any) -> None:
        kept = cache._cache_file
        super().__init__(kept._cache_path, cache._impl.filename_base, kept._source_stamp)
        self._version += " with checksums"  # files without are of another version, not damaged

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (self._source_stamp, key, data))

    def load(self, key: Any) -> Any:
        found = super().load(key)
        return found[2] if found is not None and found[:2] == (self._source_stamp, key) else None

    def _dump(self, item: Any) -> bytes:
        data: bytes = super()._dump(item)
        return data + _checksum(data)  # pickle ignores what follows the item

    def _load_index(self) -> Any:
        version = pickle.dumps(self._version, protocol=-1)
        with suppress(FileNotFoundError):
            data = Path(self._index_path).read_bytes()
            if data.startswith(version):
                _check(data[len(version) :])
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        data = Path(self._data_path(name)).read_bytes()
        _check(data)
        return pickle.loads(data)


CHECKSUM_BYTES = 4


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")


def _check(data: bytes) -> None:
    """Raises ValueError unless the data end with their checksum."""
    if data[-CHECKSUM_BYTES:] != _checksum(data[:-CHECKSUM_BYTES]):
        raise ValueError("its checksum is wrong")


_damaged: list[str] = []


def _warn_of_damage(cache: Any, error: Exception) -> None:
    """Warns for the first function only."""
    if not _damaged:
        logger.warning(
            "compiled code in %s is damaged or cannot be read (%s: %s), so it is compiled again; "
            "this takes seconds, once",
            cache.cache_path,
            type(error).__name__,
            error,
        )
    _damaged.append(str(error))


_warned: list[str] = []


def _warn_once(reason: str) -> None:
    """Warns for the first function only: the reason is the same for all."""
    if not _warned:
        logger.warning(
            "cannot cache compiled code (%s), so every process compiles it again; set "
            "NUMBA_CACHE_DIR to a writable folder",
            reason,
        )
    _warned.append(reason)


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for functions that only compiled functions call."""
    made: Callable[P, R] = _for_any_number(numba.njit(**OPTIONS, **INNER)(function))
    return made


def _for_any_number(made: Any) -> Any:
    """Compiles once for all integer arguments; by default, numba compiles again for each literal in
    a caller."""
    template = made.get_call_template
    any_of: Callable[[Any], Any] = numba.types.unliteral

    def without_literals(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        known = {name: any_of(kind) for name, kind in keywords.items()}
        return template(tuple(map(any_of, arguments)), known)

    made.get_call_template = without_literals
    return made
