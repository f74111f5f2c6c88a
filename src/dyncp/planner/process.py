"""The planning process: the parent's end (PlanProcess) and the process itself (main); or, without
one, plans that the caller's thread makes (PlanHere).

Requests have a timeout, and a process that dies is restarted. It imports neither torch nor CUDA. It
is started as a separate program, not by `multiprocessing`, so it does not import the user's script
again. A request is a pickled call with numpy arguments, sent over a socket pair; the reply is
pickled, too. The process exits with its parent, even in the middle of a plan.
"""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep

import dyncp
from dyncp.plan import Plan

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # for a call that kills the process
KILL_SECONDS = 5.0
PARENT_CHECK_SECONDS = 1.0
START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from dyncp.planner.process import main; main(int(sys.argv[1]))"
)


class PlanFailed(RuntimeError):  # noqa: N818 (the run continues with another plan)
    """The planner produced no plan for a batch; the text is the reason."""


class Closed(Exception):  # noqa: N818 (no error: it ends threads that wait)
    """Raised in a thread that waits for an object which is being closed."""


@dataclass(frozen=True)
class PlanReply:
    """The encoded parts of a plan: of all ranks, or of those that this process runs."""

    parts: tuple[bytes, ...]
    seconds: float
    most_tokens: int = 0  # on any rank
    static_because: str = ""  # it is a static plan for this reason


class PlanHere:
    """Plans in the calling thread, with the interface of a planning process. A call that hangs
    cannot be given up."""

    pid, restarts = None, 0
    has_planned = True

    def start(self) -> None:
        """Has nothing to start."""

    def plan(self, make_plan: Callable[[], Plan]) -> PlanReply:
        """Runs `make_plan`. Raises PlanFailed with the reason if it raises."""
        reply = reply_of(make_plan)
        if isinstance(reply, str):
            raise PlanFailed(f"the planner {reply}")
        return reply

    def close(self) -> None:
        """Has nothing to end."""


class PlanProcess:
    """One planning process, started on first use. One thread requests plans; any thread may close
    it."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.restarts = 0
        self.has_planned = False  # before, a plan takes long: the process starts, and may compile
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closing = False
        self._starting = threading.Lock()
        self._asking = threading.RLock()  # a collected loader may be closed inside `plan`

    @property
    def pid(self) -> int | None:
        """Id of the process; None if it is not running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Starts the process ahead of the first request. If that fails, `plan` raises the error."""
        if self._connection is None:
            with suppress(OSError):
                self._start()

    def plan(self, make_plan: Callable[[], Plan]) -> PlanReply:
        """Runs `make_plan`, which must be picklable, in the process and returns its plan. A process
        that dies is restarted and asked again. Raises PlanFailed with the reason if the call
        raises, takes too long, or kills the process every time."""
        request = pickle.dumps(pickle.dumps(make_plan))  # twice: received before it is unpickled
        deadline = monotonic() + self.timeout
        with self._asking:
            for _ in range(ATTEMPTS):
                try:
                    reply = self._ask(request, deadline)
                except TimeoutError:
                    self._end()
                    self.restarts += 1
                    reply = f"did not answer within {self.timeout:g} s"
                except (EOFError, OSError, pickle.UnpicklingError):
                    self._note_death()
                    continue
                if isinstance(reply, str):
                    raise PlanFailed(f"the planner {reply}")
                self.has_planned = True
                return reply
        raise PlanFailed(f"the planning process died {ATTEMPTS} times")

    def close(self) -> None:
        """Ends the process. If another thread waits in `plan`, that raises Closed. The next `plan`
        starts a new process."""
        with self._starting:
            self._closing = True
            process, connection = self._process, self._connection
        if process is not None:
            process.kill()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._asking:
            self._end()
            self._closing = False

    def _ask(self, request: bytes, deadline: float) -> PlanReply | str:
        connection = self._connection or self._start()
        connection.settimeout(max(1e-3, deadline - monotonic()))
        connection.sendall(request)
        connection.settimeout(max(1e-3, deadline - monotonic()))
        reply: PlanReply | str = pickle.load(connection.makefile("rb"))
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

    def _note_death(self) -> None:
        """Cleans up after the process died; the next request starts another."""
        if self._closing:
            raise Closed
        code = self._end()
        self.restarts += 1
        how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        logger.info("the planning process ended (%s); restarting it", how)

    def _end(self) -> int | None:
        """Ends the process and returns its exit code."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        code = None
        if process is not None:
            process.kill()
            code = process.wait(KILL_SECONDS)
        if connection is not None:
            connection.close()
        return code


def _search_path() -> list[str]:
    """This process's module path, with the directory of this dyncp first."""
    own = str(Path(dyncp.__file__).resolve().parents[1])
    return [own, *(entry or os.getcwd() for entry in sys.path if entry != own)]


# Inside the planning process:


def main(file_descriptor: int) -> None:
    exit_with_parent()
    connection = socket.socket(fileno=file_descriptor)
    requests = connection.makefile("rb")
    with suppress(EOFError, OSError):  # the parent closed the connection
        while True:
            connection.sendall(pickle.dumps(answer(pickle.load(requests))))


def answer(request: bytes) -> PlanReply | str:
    """Runs a pickled call; returns its plan, or a text that says what it raised."""
    try:
        make_plan = pickle.loads(request)  # may need a module that cannot be imported here
    except Exception as error:
        return f"raised {type(error).__name__}: {error} (reading the request)"
    return reply_of(make_plan)


def reply_of(make_plan: Callable[[], Plan]) -> PlanReply | str:
    """Makes a plan; returns it, or a text that says what was raised."""
    start = perf_counter()
    try:
        plan = make_plan()
        most_tokens = int(plan.parts[0].tokens_per_rank.max())
        return PlanReply(plan.encoded_parts, perf_counter() - start, most_tokens)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"raised {type(error).__name__}: {error} ({last.name}, line {last.lineno})"


def exit_with_parent() -> None:
    """Ends this process soon after its parent. A parent that is killed cannot end it, and a forked
    child of the parent may keep the socket open."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
