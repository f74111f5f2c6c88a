"""Solvers `bisection` (bytes priced by their links) and `bisection_bytes` (all bytes alike).

`bisection_quality` and `bisection_bytes_quality` try more.

Geometric recursive bisection in several ways, then repair and local passes for the best of them:

    problem ─► recurse (split, cuts, bands, heavy) ─► polish (repair, refine, anneal) ─► solve

Whole sequences are shared out first; one that must be cut is cut into bands of rows or columns, or
between head groups, at the fewest bytes of data blocks that both sides need. Then tiles and blocks
are moved until both balance limits hold, and while moves gain bytes.
"""

from dyncp.placement.bisection.solve import (
    bisection,
    bisection_bytes,
    bisection_bytes_quality,
    bisection_quality,
)

__all__ = ["bisection", "bisection_bytes", "bisection_bytes_quality", "bisection_quality"]
