"""Solver `rows`: every tile runs where its query rows live, so that only keys travel."""

from dyncp.placement.rows.solve import rows, rows_fine

__all__ = ["rows", "rows_fine"]
