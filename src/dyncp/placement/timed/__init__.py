"""Improves placements by moves of blocks that shorten the estimated step."""

from dyncp.placement.timed.solve import Prices, improve

__all__ = ["Prices", "improve"]
