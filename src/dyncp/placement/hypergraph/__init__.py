"""Solver `hypergraph`: Mt-KaHyPar (extra `dyncp[hypergraph]`), repaired to the balance limits.

    build ─► split (client ─► worker process) ─► finish ─► solve

Blocks and tiles become the vertices of one weighted hypergraph, which is split between the
nodes, then between the ranks of each; moves of single tiles and blocks do the rest. The library
holds the GIL, so it runs in a process of its own that may crash or hang without harm to the
planner.
"""

from dyncp.placement.hypergraph.client import SolverError
from dyncp.placement.hypergraph.solve import hypergraph

__all__ = ["SolverError", "hypergraph"]
