"""Solver `rows`: every tile runs where its query rows live, so that only keys travel."""

from dyncp.placement.rows.solve import rows

__all__ = ["rows"]
