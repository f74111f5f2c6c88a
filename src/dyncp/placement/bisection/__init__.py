"""Solvers `bisection` (bytes priced by their links) and `bisection_bytes` (all bytes alike).

Geometric recursive bisection, then repair and local passes:

    problem ─► recurse (split, bands) ─► polish (refine) ─► solve

Whole sequences are shared out first; one that must be cut is cut into bands of rows or columns, at
the fewest bytes of data blocks that both sides need. Then tiles and blocks are moved until both
balance limits hold, and while moves gain bytes..
"""

from dyncp.placement.bisection.solve import bisection, bisection_bytes

__all__ = ["bisection", "bisection_bytes"]
