"""The planning process: takes requests from its parent's socket, plans, answers. No torch, no CUDA.

It is started as a program of its own, not by `multiprocessing`: the user's script is not imported
again, and nothing but numpy arrays and our own dataclasses is sent. When the parent is gone, so is
this process, even in the middle of a plan.
"""

import os
import pickle
import queue
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from dyncp.blocks import AttentionShape, Batch
from dyncp.cost import CostModel, ModelConfig
from dyncp.plan import Plan, encode_part
from dyncp.planner import PlannerConfig
from dyncp.topology import Topology

_HEAD = struct.Struct("<Q")
PARENT_CHECK_SECONDS = 1.0


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
    """Every rank's encoded part, or why there are none."""

    parts: tuple[bytes, ...] = ()
    digest: str = ""
    fingerprint: str = ""
    solver: str = ""
    most_tokens: int = 0  # of the fullest rank
    seconds: float = 0.0
    error: str = ""


def answer(request: PlanRequest) -> PlanReply:
    """Plans; an error of the planner becomes its text."""
    start = perf_counter()
    try:
        return reply_of(request.plan(), start)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        return PlanReply(error=text, seconds=perf_counter() - start)


def answer_pickled(pickled: bytes) -> PlanReply:
    """The same for a request that may not be readable here."""
    try:
        request = pickle.loads(pickled)
    except Exception as error:
        return PlanReply(error=f"{type(error).__name__}: {error} (reading the request)")
    return answer(request)


def reply_of(plan: Plan, start: float) -> PlanReply:
    return PlanReply(
        parts=tuple(encode_part(part) for part in plan.parts),
        digest=plan.digest,
        fingerprint=plan.fingerprint,
        solver=plan.parts[0].solver,
        most_tokens=int(plan.parts[0].tokens_per_rank.max()),
        seconds=perf_counter() - start,
    )


def send(connection: socket.socket, item: Any) -> None:
    data = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(_HEAD.pack(len(data)))
    connection.sendall(data)


def receive(connection: socket.socket) -> Any:
    """The next item; EOFError when the other side is gone."""
    return pickle.loads(receive_bytes(connection))


def receive_bytes(connection: socket.socket) -> bytes:
    (size,) = _HEAD.unpack(_receive_bytes(connection, _HEAD.size))
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


def main(file_descriptor: int) -> None:
    connection = socket.socket(fileno=file_descriptor)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for target, args in (
        (_read_requests, (connection, requests)),
        (_watch_parent, (os.getppid(),)),
    ):
        threading.Thread(target=target, args=args, daemon=True).start()
    while True:
        send(connection, answer_pickled(requests.get()))


def _read_requests(connection: socket.socket, requests: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            requests.put(receive_bytes(connection))
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone, or wants no more


def _watch_parent(parent: int) -> None:
    """A forked child of the parent may keep the socket open for longer than the parent lives."""
    tick = threading.Event()
    while not tick.wait(PARENT_CHECK_SECONDS):
        if os.getppid() != parent:
            os._exit(0)
