"""The static methods, as the choices they consist of."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dyncp.arrays import Int64, frozen
from dyncp.blocks import AttentionShape, BlockGraph
from dyncp.placement.placement import Placement
from dyncp.placement.static.grid import Grid
from dyncp.placement.static.hybrid import (
    contiguous_ranks,
    contiguous_sizes,
    heap_ranks,
    packed_sizes,
    snake_ranks,
    zigzag_ranks,
    zigzag_sizes,
)
from dyncp.placement.static.place import (
    Deal,
    Spread,
    nodes_of,
    on_grid,
    place_packed,
    place_spread,
    traffic_on,
)
from dyncp.topology import Topology


@dataclass(frozen=True, slots=True)
class Method:
    """One static method.

    `spread` cuts every sequence by itself, `deal` cuts the packed batch. `pattern` is how keys and
    values travel; "minimal" is only where tiles read them. `heads` says how the head degree is
    chosen where none is given: "one", as many as divide kv heads and "ranks" or a "node", and
    `only_heads` that a group has no second dimension.
    """

    name: str
    pattern: str
    sizes: Callable[[Sequence[int], int], Int64]
    spread: Spread | None = None
    deal: Deal | None = None
    heads: str = "one"
    only_heads: bool = False
    context_first: bool = False
    by_node: bool = False

    @property
    def splits_heads(self) -> bool:
        return self.heads != "one"

    def block_sizes(self, lengths: Sequence[int], degree: int, num_ranks: int) -> Int64:
        """Sequences are cut for the ranks of their group, the packed batch for all of them."""
        return self.sizes(lengths, degree if self.deal is None else num_ranks)

    def default_heads(self, shape: AttentionShape, topology: Topology) -> int:
        """The largest head degree that kv heads and ranks allow; 1 while the model is unknown."""
        if not self.splits_heads or not shape.exact:
            return 1
        ranks = topology.num_ranks if self.heads == "ranks" else topology.ranks_per_node
        return math.gcd(shape.kv_heads, ranks)

    def place(self, graph: BlockGraph, topology: Topology, grid: Grid, name: str) -> Placement:
        if self.spread is not None:
            group, position = place_spread(graph, grid, self.spread)
        else:
            assert self.deal is not None, f"method {self.name} cuts neither sequences nor batch"
            group, position = place_packed(graph, grid, self.deal)
        placement, ring, home = on_grid(graph, grid, group, position, name)
        if self.pattern == "minimal":
            return placement
        traffic = traffic_on(grid, self.pattern, ring, home)
        if self.by_node:
            traffic = replace(traffic, node=frozen(nodes_of(topology)))
        return replace(placement, traffic=traffic)


METHODS = {
    method.name: method
    for method in (
        Method("ring", "ring", contiguous_sizes, contiguous_ranks),
        Method("zigzag", "ring", zigzag_sizes, zigzag_ranks),
        Method("all_gather", "all_gather", zigzag_sizes, zigzag_ranks),
        Method("all_gather_by_node", "all_gather", zigzag_sizes, zigzag_ranks, by_node=True),
        Method(
            "ulysses", "minimal", contiguous_sizes, contiguous_ranks, heads="ranks", only_heads=True
        ),
        Method("loongtrain", "ring", zigzag_sizes, zigzag_ranks, heads="ranks", context_first=True),
        Method("transformer_engine", "ring", zigzag_sizes, zigzag_ranks, heads="node"),
        Method("magi", "minimal", packed_sizes, deal=heap_ranks),
        Method("ptrr", "all_gather", packed_sizes, deal=snake_ranks),
    )
}
