"""Checks of user input, which raise a ValueError with a clear sentence; the number of cores, and
the memory that is left."""

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


def check_memory(what: str, needed: float, instead: str) -> None:
    """Raises MemoryError if `what` would need more bytes than are available; without that, the
    system kills the process, and nobody learns why. `instead` says what to do."""
    available = available_memory()
    if available is not None and needed > available:
        raise MemoryError(
            f"{what} would need about {_gigabytes(needed)} of memory, and {_gigabytes(available)} "
            f"are available; {instead}"
        )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.{0 if size >= 1e10 else 1}f} GB"


def available_memory() -> int | None:
    """Bytes that this process can still use: what the machine has left, with swap, and what its
    control group has left. None where the system does not say (not on Linux)."""
    lines = _read("/proc/meminfo").splitlines()
    left = [int(x.split()[1]) * 1024 for x in lines if x.startswith(("MemAvailable", "SwapFree"))]
    if not left:
        return None
    groups = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    )
    found = [sum(left)]
    for most, used in groups:
        limit, now = _read(most).strip(), _read(used).strip()
        if limit.isdigit() and now.isdigit():  # "max" is no limit
            found.append(int(limit) - int(now) + _file_cache(Path(most).parent))
    return max(0, min(found))


def _file_cache(group: Path) -> int:
    """Bytes of files that a control group keeps in memory, and can drop."""
    names = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")
    lines = (line.split() for line in _read(str(group / "memory.stat")).splitlines())
    sizes = {line[0]: int(line[1]) for line in lines if line[0] in names}
    plain = sizes.get("inactive_file", 0) + sizes.get("active_file", 0)
    nested = sizes.get("total_inactive_file", 0) + sizes.get("total_active_file", 0)
    return max(plain, nested)


def _read(path: str) -> str:
    """The text of a file; empty if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def instance_of(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raises ValueError unless `value` has one of these types; `expected` describes them."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is {type(value).__name__}; expected {expected}")
