"""The process that calls Mt-KaHyPar once. It runs as a script and imports nothing from dyncp.

It reads a pickle of (hypergraphs, parts, imbalance, seconds) from standard input. A hypergraph is
four lists: vertex weights, edge weights, the start of each edge's pins, and the pins. It writes a
pickle to standard output: one list of parts per hypergraph, or a message if the library failed.
"""

import math
import os
import pickle
import signal
import sys
from functools import cache
from itertools import pairwise
from typing import Any


@cache
def _initialize(mtkahypar: Any, threads: int) -> Any:
    return mtkahypar.initialize(threads, False)


def partition(
    hypergraph: list[list[int]], parts: int, imbalance: float, threads: int = 1
) -> list[int]:
    """The part of every vertex. The deterministic preset gives the same parts for any number of
    threads and ignores seeds. One thread is the default because many planners run at once."""
    import mtkahypar

    library = _initialize(mtkahypar, threads)
    vertex_weight, edge_weight, start, pins = hypergraph
    context = library.context_from_preset(mtkahypar.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(parts, imbalance, mtkahypar.Objective.KM1)
    context.logging = False
    edges = [pins[a:b] for a, b in pairwise(start)]
    given = (len(vertex_weight), len(edges), edges, vertex_weight, edge_weight)
    found: list[int] = library.create_hypergraph(context, *given).partition(context).get_partition()
    return found


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the library's prints out of the reply
    hypergraphs, parts, imbalance, seconds = pickle.load(sys.stdin.buffer)
    if hasattr(signal, "alarm"):  # ends a hanging worker even if its parent is gone
        signal.alarm(math.ceil(seconds) + 1)
    reply: Any
    try:
        reply = [partition(hypergraph, parts, imbalance) for hypergraph in hypergraphs]
    except Exception as error:
        reply = f"{type(error).__name__}: {error}"
    pickle.dump(reply, replies)
    replies.flush()
    os._exit(0)  # skips the library's clean-up, which has crashed in the past


if __name__ == "__main__":
    main()
