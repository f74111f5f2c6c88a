"""The machines and ranks a plan is made for, and the links between them."""

from dyncp.topology.link import Link
from dyncp.topology.presets import PRESETS, preset
from dyncp.topology.topology import Topology

__all__ = ["PRESETS", "Link", "Topology", "preset"]
