"""The protocol that all placement solvers share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dyncp.arrays import Int64
from dyncp.blocks import BlockGraph, choose_block_sizes
from dyncp.placement.placement import Limits, Placement
from dyncp.topology import Topology


@dataclass(frozen=True, slots=True)
class Solver:
    """A function of its arguments and nothing else: same batch, same seed, same placement.

    `block_sizes` cuts the sequences the way the method needs.
    """

    name: str
    place: Callable[[BlockGraph, Topology, Limits, int], Placement]
    block_sizes: Callable[[Sequence[int], int], Int64] = choose_block_sizes
