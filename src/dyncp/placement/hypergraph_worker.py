"""The process that calls Mt-KaHyPar. It is started as a file and imports nothing of dyncp.

Requests and replies are lists of int64 arrays: how many, their lengths, their values. A request has
[parts, allowed imbalance in millionths, seconds], the weights of vertices and of edges, where the
pins of each edge start, and the pins. A reply has [OK] and the part of every vertex, or [FAILED]
and a message in UTF-8.
"""

import os
import signal
from array import array
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any, Protocol

OK, FAILED = 0, 1


class Values(Protocol):
    """An array of int64."""

    def __len__(self) -> int: ...
    def tobytes(self) -> bytes: ...


class Stream(Protocol):
    """A pipe without a buffer, so that a forked copy has nothing left to write."""

    def read(self, size: int, /) -> bytes | None: ...
    def write(self, data: memoryview, /) -> int | None: ...


def send(stream: Stream, arrays: Sequence[Values]) -> None:
    header = array("q", [len(arrays), *map(len, arrays)])
    left = memoryview(b"".join(a.tobytes() for a in (header, *arrays)))
    while left:
        left = left[stream.write(left) :]


def receive(stream: Stream) -> "list[array[int]]":
    """Raises EOFError when the other side is gone."""
    lengths = _read(stream, _read(stream, 1)[0])
    return [_read(stream, length) for length in lengths]


def _read(stream: Stream, length: int) -> "array[int]":
    data = bytearray()
    while len(data) < 8 * length:
        piece = stream.read(8 * length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return array("q", bytes(data))


@cache
def _library() -> tuple[Any, Any]:
    """The library and its handle, with one thread: planners run on many processes at once."""
    library = import_module("mtkahypar")
    return library, library.initialize(1, False)


def partition(arrays: "list[array[int]]") -> "array[int]":
    """The part of every vertex. The deterministic preset gives the same parts for any number of
    threads, and takes no seed."""
    (parts, imbalance, _), vertex_weight, edge_weight, start, pins = arrays
    library, handle = _library()
    context = handle.context_from_preset(library.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(parts, imbalance / 1e6, library.Objective.KM1)
    context.logging = False
    edges = [pins[a:b].tolist() for a, b in pairwise(start)]
    given = (len(vertex_weight), len(edges), edges, vertex_weight.tolist(), edge_weight.tolist())
    return array("q", handle.create_hypergraph(context, *given).partition(context).get_partition())


def answer(arrays: "list[array[int]]") -> "list[array[int]]":
    # Ends a hanging worker whose parent is gone; the library keeps Python from doing it.
    if hasattr(signal, "alarm"):
        signal.alarm(arrays[0][2] + 1)
    try:
        return [array("q", [OK]), partition(arrays)]
    except Exception as error:
        message = f"{type(error).__name__}: {error}".encode()
        return [array("q", [FAILED]), array("q", list(message))]
    finally:
        if hasattr(signal, "alarm"):
            signal.alarm(0)


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    requests, replies = os.fdopen(0, "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the library prints must not mix with replies
    while True:
        try:
            send(replies, answer(receive(requests)))
        except (EOFError, OSError):
            os._exit(0)  # without the library's own clean-up, which has crashed in the past


if __name__ == "__main__":
    serve()
