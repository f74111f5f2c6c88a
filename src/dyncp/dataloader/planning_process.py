"""The planning process, both ends: `PlanProcess` in the training process, `main` in its child.

The child imports neither torch nor CUDA. It is started as a program of its own, not by
`multiprocessing`, so the user's script is not imported again; requests and replies are dataclasses
of numpy arrays, pickled over a socket pair. The child exits when its parent is gone, even in the
middle of a plan.
"""

import logging
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import dyncp
from dyncp.blocks import AttentionShape, Batch
from dyncp.cost import CostModel, ModelConfig
from dyncp.plan import Plan, encode_part
from dyncp.planner import PlannerConfig
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # a batch that kills the planner this often gets a static plan
KILL_SECONDS = 5.0
PARENT_CHECK_SECONDS = 1.0
START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from dyncp.dataloader.planning_process import main; main(int(sys.argv[1]))"
)
_SIZE = struct.Struct("<Q")


class PlanFailed(RuntimeError):  # noqa: N818 (the run goes on: the batch gets a static plan)
    """The planner produced no plan for a batch; the text is the reason."""


class Closed(Exception):  # noqa: N818 (never leaves the loader)
    """The iteration is closing: threads stop waiting."""


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `plan_batch`, and the function to call with them."""

    function: Callable[..., Plan]
    batch: Batch
    topology: Topology
    shape: AttentionShape
    config: PlannerConfig
    cost: CostModel | None = None
    model: ModelConfig | None = None

    def plan(self) -> Plan:
        args = (self.batch, self.topology, self.shape, self.config)
        return self.function(*args, cost=self.cost, model=self.model)


@dataclass(frozen=True)
class PlanReply:
    """Every rank's encoded part, or the error."""

    parts: tuple[bytes, ...] = ()
    digest: str = ""
    fingerprint: str = ""
    solver: str = ""
    most_tokens: int = 0  # on any rank
    seconds: float = 0.0
    error: str = ""


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
        """None unless the process is running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Starts the process ahead of the first request. A failure to start shows in `plan`."""
        if self._connection is None:
            with suppress(OSError):
                self._start()

    def plan(self, request: PlanRequest) -> PlanReply:
        """Plans; a process that dies is replaced and asked again. PlanFailed gives the reason if
        the planner raises, does not answer in time, or keeps dying."""
        deadline = monotonic() + self.timeout
        for _ in range(ATTEMPTS):
            try:
                reply = self._ask(request, deadline)
            except TimeoutError:
                self._end()
                self.restarts += 1
                raise PlanFailed(f"the planner did not answer within {self.timeout:g} s") from None
            except (EOFError, OSError):
                self._replace()
                continue
            if reply.error:
                raise PlanFailed(f"the planner raised {reply.error}")
            return reply
        raise PlanFailed(f"the planning process died {ATTEMPTS} times")

    def interrupt(self) -> None:
        """Makes a `plan` that another thread is waiting in raise Closed, and all later ones."""
        with self._starting:
            self._closing = True
            process, connection = self._process, self._connection
        if process is not None:
            process.kill()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process. The next `plan` starts a new one."""
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

    def _replace(self) -> None:
        """After the process died; the next request starts another."""
        if self._closing:
            raise Closed
        code = self._end()
        self.restarts += 1
        killed = code is not None and code < 0
        how = signal.Signals(-code).name if killed and code else f"exit code {code}"
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


# Both ends


def send(connection: socket.socket, item: Any) -> None:
    data = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(_SIZE.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """The next item; EOFError when the other end is gone."""
    return pickle.loads(_receive_pickled(connection))


def _receive_pickled(connection: socket.socket) -> bytes:
    (size,) = _SIZE.unpack(_receive_bytes(connection, _SIZE.size))
    return _receive_bytes(connection, size)


def _receive_bytes(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
    return bytes(data)


# In the planning process


def main(file_descriptor: int) -> None:
    connection = socket.socket(fileno=file_descriptor)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(connection, requests), daemon=True).start()
    exit_with_parent()
    while True:
        send(connection, _answer_pickled(requests.get()))


def answer(request: PlanRequest) -> PlanReply:
    """Plans; an error of the planner is returned as text."""
    start = perf_counter()
    try:
        plan = request.plan()
        return PlanReply(
            parts=tuple(encode_part(part) for part in plan.parts),
            digest=plan.digest,
            fingerprint=plan.fingerprint,
            solver=plan.parts[0].solver,
            most_tokens=int(plan.parts[0].tokens_per_rank.max()),
            seconds=perf_counter() - start,
        )
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        return PlanReply(error=text, seconds=perf_counter() - start)


def _answer_pickled(pickled: bytes) -> PlanReply:
    try:
        request = pickle.loads(pickled)
    except Exception as error:  # a module that this process cannot import
        return PlanReply(error=f"{type(error).__name__}: {error} (reading the request)")
    return answer(request)


def _read_requests(connection: socket.socket, requests: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            requests.put(_receive_pickled(connection))
    except (EOFError, OSError):
        os._exit(0)  # the parent closed the connection


def exit_with_parent() -> None:
    """Ends this process soon after its parent: one that was killed cannot do so, and a forked child
    of it may keep the socket open."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()
