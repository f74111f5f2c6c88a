"""PlanProcess: the parent's end of the planning process. Starts it, bounds it, replaces it."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic

import dyncp
from dyncp.dataloader.errors import Closed, PlanFailed
from dyncp.dataloader.plan_worker import PlanReply, PlanRequest, receive, send

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # a batch that kills the planner as often gets a static plan
END_SECONDS = 5.0
START = "import sys; sys.path[:] = sys.argv[2:]; from dyncp.dataloader.plan_worker import main; "
START += "main(int(sys.argv[1]))"


class PlanProcess:
    """One planning process, started on first use. One thread asks for plans; any may close it."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closing = False
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the planning process, if one runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Starts the process before there is something to plan; `plan` says what prevents it."""
        if self._connection is None:
            with suppress(OSError):
                self._start()

    def plan(self, request: PlanRequest) -> PlanReply:
        """Plans; a process that died is replaced and asked again. PlanFailed says why there is no
        plan: the planner raised, did not answer in time, or died over and over."""
        deadline = monotonic() + self.timeout
        for _ in range(ATTEMPTS):
            try:
                reply = self._ask(request, deadline)
            except TimeoutError:
                self._end()
                self.restarts += 1
                raise PlanFailed(f"the planner did not answer within {self.timeout:g} s") from None
            except (EOFError, OSError):
                self._died()
                continue
            if reply.error:
                raise PlanFailed(f"the planner raised {reply.error}")
            return reply
        raise PlanFailed(f"the planning process died {ATTEMPTS} times")

    def interrupt(self) -> None:
        """Makes a `plan` that another thread waits for raise Closed, and all later ones."""
        with self._starting:
            self._closing = True
            process, connection = self._process, self._connection
        if process is not None:
            process.kill()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process. It may be used again: the next plan starts a new one."""
        self.interrupt()
        self._end()
        self._closing = False

    def _ask(self, request: PlanRequest, deadline: float) -> PlanReply:
        connection = self._connection or self._start()
        for act in (lambda: send(connection, request), lambda: receive(connection)):
            connection.settimeout(max(1e-3, deadline - monotonic()))
            reply = act()
        assert isinstance(reply, PlanReply)
        return reply

    def _start(self) -> socket.socket:
        with self._starting:
            if self._closing:
                raise Closed
            mine, theirs = socket.socketpair()
            # A process group of its own: Ctrl-C in a terminal reaches only the training process.
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), *_search_path()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
            theirs.close()
            self._connection = mine
            return mine

    def _died(self) -> None:
        if self._closing:
            raise Closed
        code = self._end()
        self.restarts += 1
        logger.info("the planning process ended (%s) and is replaced", _describe(code))

    def _end(self) -> int | None:
        """Ends the process and returns its exit code."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        code = None
        if process is not None:
            process.kill()
            code = process.wait(END_SECONDS)
        if connection is not None:
            connection.close()
        return code


def _search_path() -> list[str]:
    """Where this process finds modules; dyncp itself first, from wherever it came."""
    own = str(Path(dyncp.__file__).resolve().parents[1])
    return [own, *(entry or os.getcwd() for entry in sys.path if entry != own)]


def _describe(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
