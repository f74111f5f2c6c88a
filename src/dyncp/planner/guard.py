"""Runs solvers so that one that fails or hangs does not stop planning."""

import logging
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

Found = TypeVar("Found")

log = logging.getLogger("dyncp.planner")


class SolverTimeoutError(RuntimeError):
    """A solver did not answer in time."""


def run_bounded(call: Callable[[], Found], seconds: float, name: str) -> Found:
    """The result of `call`; where it takes longer, SolverTimeoutError, and its thread is left
    alone."""
    found: list[Found] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:  # handed on to the caller's thread
            failed.append(error)

    thread = Thread(target=work, name=f"dyncp {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise SolverTimeoutError(f"solver {name} took longer than {seconds:g} s")
    return found[0]


def warn_replaced(name: str, error: Exception, instead: str) -> None:
    log.warning(
        "solver %s failed (%s: %s); planning goes on with %s",
        name,
        type(error).__name__,
        error,
        instead,
    )
