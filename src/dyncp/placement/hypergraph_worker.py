"""The process that calls Mt-KaHyPar, once. It is started as a file and imports nothing of dyncp.

Standard input has a pickle of (hypergraphs, parts, imbalance, seconds); a hypergraph is four lists:
the weights of vertices and of edges, where the pins of each edge start, and the pins. Standard
output gets a pickle of the lists of parts, or of a message where the library failed.
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
    threads, and takes no seed; planners run on many processes at once, so one is the default."""
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
    os.dup2(2, 1)  # what the library prints must not mix with replies
    hypergraphs, parts, imbalance, seconds = pickle.load(sys.stdin.buffer)
    if hasattr(signal, "alarm"):  # ends a hanging worker whose parent is gone
        signal.alarm(math.ceil(seconds) + 1)
    reply: Any
    try:
        reply = [partition(hypergraph, parts, imbalance) for hypergraph in hypergraphs]
    except Exception as error:
        reply = f"{type(error).__name__}: {error}"
    pickle.dump(reply, replies)
    replies.flush()
    os._exit(0)  # without the library's own clean-up, which has crashed in the past


if __name__ == "__main__":
    main()
