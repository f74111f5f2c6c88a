"""The worker process, seen from the planner: started on first use, replaced when it died."""

import atexit
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from time import monotonic
from typing import cast

import numpy as np

from dyncp.arrays import Int64
from dyncp.placement import hypergraph_worker as worker

# SolverError: a solver could not run.


class SolverError(RuntimeError):
    """The solver gave no placement, for a reason that lies outside the batch."""

    def __init__(self, solver: str, reason: str) -> None:
        super().__init__(f"solver {solver!r} gave no placement: {reason}")


NAME = "hypergraph"
# The worker gets two chances: it may have died for reasons of its own, such as a lack of memory.
ATTEMPTS = 2

_log = logging.getLogger(__name__)


def check_installed() -> None:
    if find_spec("mtkahypar") is None:
        raise SolverError(
            NAME, "the package mtkahypar is not installed; pip install 'dyncp[hypergraph]'"
        )


class Worker:
    """One process, one request at a time. No multiprocessing: daemonic processes plan, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def partition(
        self, hypergraph: Sequence[Int64], parts: int, imbalance: float, timeout: float
    ) -> Int64:
        """The part of every vertex of a hypergraph, given as the weights of vertices and of edges,
        where the pins of each edge start, and the pins. SolverError after `timeout` seconds."""
        header = np.array([parts, round(1e6 * imbalance), math.ceil(timeout)], np.int64)
        request = [header, *(a.astype(np.int64) for a in hypergraph)]
        with self._lock:
            status, reply = self._ask(request, timeout)
        if status != worker.OK:
            raise SolverError(NAME, f"mtkahypar failed: {bytes(reply.tolist()).decode()}")
        return reply

    def _ask(self, request: Sequence[Int64], timeout: float) -> tuple[int, Int64]:
        for _ in range(ATTEMPTS):
            try:
                return self._ask_once(request, timeout)
            except ConnectionError as lost:
                reason = str(lost)
                _log.warning("solver %r: %s", NAME, reason)
        raise SolverError(NAME, f"{reason}, {ATTEMPTS} times")

    def _ask_once(self, request: Sequence[Int64], timeout: float) -> tuple[int, Int64]:
        """Raises ConnectionError when the process dies. A process that gave no whole answer, also
        because of an interrupt here, is not used again: half a request must not meet the next."""
        process, began = self._running(), monotonic()
        killer = threading.Timer(timeout, process.kill)
        killer.start()
        try:
            worker.send(cast(worker.Stream, process.stdin), request)
            (status,), reply = worker.receive(cast(worker.Stream, process.stdout))
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # to learn how it ended
            self.stop()
            if monotonic() - began >= timeout:
                raise SolverError(NAME, f"no answer from its worker in {timeout:g} s") from None
            raise ConnectionError(f"its worker process ended {_ending(process)}") from None
        except BaseException:
            self.stop()
            raise
        finally:
            killer.cancel()
        return status, np.array(reply, np.int64)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.stop()  # closes the pipes of one that died
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close(process)

    def forget(self) -> None:
        """Called in a forked child: drops the handle; the worker belongs to the parent."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # not ours to wait for
            _close(process)


def _close(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _ending(process: "subprocess.Popen[bytes]") -> str:
    code = process.returncode
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


WORKER = Worker()
atexit.register(WORKER.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKER.forget)
