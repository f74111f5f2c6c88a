"""Static context parallelism: methods that cut sequences and send keys without looking at the mask.

METHODS lists them. A method with its degrees is a solver: "zigzag", "zigzag/cp8",
"loongtrain/cp8h2". Method megatron_hybrid has its own file.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dyncp.arrays import Int64, frozen
from dyncp.blocks import AttentionShape, BlockGraph, choose_sizes_by_work
from dyncp.placement.megatron_hybrid import hybrid_candidates, hybrid_with_budget, megatron_hybrid
from dyncp.placement.placement import Limits, Placement, Traffic
from dyncp.placement.solver import Degrees, Solver
from dyncp.placement.static_layouts import (
    Deal,
    Grid,
    chunk_sizes,
    contiguous_ranks,
    deal_sequences,
    divisors,
    heap_ranks,
    packed_ranks,
    packed_sizes,
    snake_ranks,
    zigzag_ranks,
)
from dyncp.topology import Topology

_DEGREES = re.compile(r"(?:cp(\d+))?(?:h(\d+))?")
_BUDGET = re.compile(r"tokens(\d+)")


@dataclass(frozen=True, slots=True)
class Method:
    """One static method, in groups of `degree` ranks (None: all) that split the heads `heads` ways
    (None: the method chooses).

    Every sequence is cut into one (contiguous) or two (zigzag) `chunks` per rank; methods with a
    `deal` cut the packed batch instead. `pattern` says how keys and values are sent; "minimal"
    sends them only to ranks whose tiles read them. `heads_over` says how `heads` is chosen: None
    never splits heads; "ranks" and "node" take the greatest number that divides the kv heads and
    the ranks (of a node). With `only_heads` a group splits nothing but heads. `context_first` is
    the order of ranks in a group (see static_layouts.py). `by_node` all-gathers send a block to
    every node once.
    """

    name: str
    pattern: str
    chunks: int = 2
    deal: Deal | None = None
    heads_over: str | None = None
    only_heads: bool = False
    context_first: bool = False
    by_node: bool = False
    degree: int | None = None
    heads: int | None = None

    @property
    def full_name(self) -> str:
        degrees = "" if self.degree is None else f"cp{self.degree}"
        if self.heads is not None and not self.only_heads:
            degrees += f"h{self.heads}"
        return f"{self.name}/{degrees}" if degrees else self.name

    @property
    def solver(self) -> Solver:
        return Solver(
            self.full_name,
            self.place,
            self.block_sizes,
            head_groups=self.heads,
            fit=self.fit,
            degrees=Degrees(self.name, self.degree, self.heads),
        )

    def with_degrees(self, degree: int | None, heads: int | None) -> "Method":
        if self.heads_over is None:
            if heads not in (None, 1):
                raise ValueError(f"{self.name} does not split heads; got heads={heads}")
            return replace(self, degree=degree)
        if self.only_heads:
            if None not in (degree, heads) and degree != heads:
                raise ValueError(
                    f"{self.name} gives every rank of a group its own heads; got degree={degree} "
                    f"and heads={heads}, which must be equal"
                )
            degree = heads = degree if heads is None else heads
        return replace(self, degree=degree, heads=heads)

    def block_sizes(self, lengths: Sequence[int], num_ranks: int) -> Int64:
        """Cuts sequences for the ranks of a group, or the packed batch for all ranks."""
        if self.deal is not None:
            return packed_sizes(lengths, num_ranks)
        return chunk_sizes(lengths, self.chunks * (self.degree or num_ranks))

    def fit(self, shape: AttentionShape, topology: Topology) -> Solver:
        """The solver with a head degree that fits the model; ValueError if there is none."""
        method = self
        if self.heads_over is not None and self.heads is None:
            ranks = topology.num_ranks if self.heads_over == "ranks" else topology.ranks_per_node
            kv_heads = shape.kv_heads if shape.exact else 1
            most = math.gcd(kv_heads, ranks, self.degree or topology.num_ranks)
            method = self.with_degrees(self.degree, most)
        method.check(shape, topology)
        return replace(method.solver, fit=None)

    def check(self, shape: AttentionShape, topology: Topology) -> None:
        heads = self.heads or 1
        if heads > 1 and not shape.exact:
            raise ValueError(
                f"{self.full_name} splits heads; give the attention shape (model=) to use it"
            )
        if shape.kv_heads % heads:
            raise ValueError(
                f"{self.full_name} needs {heads} groups of equally many kv heads; the model has "
                f"{shape.kv_heads}, so allowed are {', '.join(map(str, divisors(shape.kv_heads)))}"
            )
        self.grid(topology, heads)

    def grid(self, topology: Topology, heads: int) -> Grid:
        degree = self.degree
        if degree is None:
            degree = heads if self.only_heads else topology.num_ranks
        return Grid.of(topology, degree, heads, self.context_first, self.full_name)

    def place(
        self, graph: BlockGraph, topology: Topology, _limits: Limits, _seed: int
    ) -> Placement:
        """Position i of a group is context i // heads and head i % heads. A tile of head group g
        runs on head g of its query block's context; with one head, on the query block's owner."""
        groups = len(graph.head_groups)
        heads = self.heads or (groups if self.heads_over else 1)
        if heads > 1 and heads != groups:
            raise ValueError(
                f"{self.full_name} needs the heads in {heads} groups; the graph has {groups}"
            )
        grid = self.grid(topology, heads)
        group = deal_sequences(graph, grid.groups)[graph.blocks.sequence]
        position = self._positions(graph, group, grid)
        context = position // heads
        owner = grid.ranks[group, context, position % heads]
        head = np.arange(groups) % heads  # of every head group
        home = grid.ranks[group, context][:, head]
        ring = group[:, None] * heads + head
        tile_rank = {
            name: frozen(home[tiles.q_block, tiles.head_group])
            for name, tiles in graph.tiles.items()
        }
        ranks, traffic = topology.num_ranks, None
        if self.pattern != "minimal":
            node = frozen(np.arange(ranks) // topology.ranks_per_node) if self.by_node else None
            traffic = Traffic(self.pattern, grid.rings, frozen(ring), frozen(home), node)
        return Placement(ranks, frozen(owner), tile_rank, self.full_name, True, traffic)

    def _positions(self, graph: BlockGraph, group: Int64, grid: Grid) -> Int64:
        """Position of every block in its group."""
        if self.deal is not None:
            return packed_ranks(graph, group, grid, self.deal)
        spread = contiguous_ranks if self.chunks == 1 else zigzag_ranks
        return spread(graph, grid.degree)


METHODS = {
    method.name: method
    for method in (
        Method("ring", "ring", chunks=1),
        Method("zigzag", "ring"),
        Method("all_gather", "all_gather"),
        Method("all_gather_by_node", "all_gather", by_node=True),
        Method("ulysses", "minimal", chunks=1, heads_over="ranks", only_heads=True),
        Method("loongtrain", "ring", heads_over="ranks", context_first=True),
        Method("transformer_engine", "ring", heads_over="node"),
        Method("magi", "minimal", deal=heap_ranks),
        Method("ptrr", "all_gather", deal=snake_ranks),
    )
}
STATIC_SOLVERS = (*(method.solver for method in METHODS.values()), megatron_hybrid)


def with_degree(method: str, degree: int | None = None, heads: int | None = None) -> Solver:
    """`method` in groups of `degree` ranks (None: all) that split the heads `heads` ways.

    If there are several groups, whole sequences are dealt to them: DP × CP.
    `with_degree("zigzag", 8)` is named "zigzag/cp8", `with_degree("loongtrain", 8, 2)`
    "loongtrain/cp8h2". Without `heads`, a method that splits heads takes the greatest number that
    the kv heads and the ranks allow.
    """
    return find_method(method).with_degrees(degree, heads).solver


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"static method is {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def static_solver(name: str) -> Solver:
    """The static solver with this name; ValueError if there is none."""
    method, _, degrees = name.partition("/")
    if method == megatron_hybrid.name:
        budget = _BUDGET.fullmatch(degrees)
        if degrees and budget is None:
            raise ValueError(f"solver is {name!r}; write it as {method}/tokens4096")
        return megatron_hybrid if budget is None else hybrid_with_budget(int(budget[1]))
    found = _DEGREES.fullmatch(degrees)
    if found is None:
        raise ValueError(f"solver is {name!r}; write degrees as {method}/cp8 or {method}/cp8h2")
    degree, heads = (None if value is None else int(value) for value in found.groups())
    return with_degree(method, degree, heads)


def static_candidates(
    lengths: Sequence[int],
    shape: AttentionShape,
    topology: Topology,
    methods: Sequence[str] | None = None,
) -> list[Solver]:
    """Every static method (or only `methods`) with every DP × CP split and head degree.

    Pure data parallelism is the same for all methods and is listed once, as "zigzag/cp1". For
    zigzag and loongtrain on 4 ranks with 2 kv heads:

        zigzag/cp1  zigzag/cp2  zigzag/cp4  loongtrain/cp4h2
    """
    wanted = [*METHODS, megatron_hybrid.name] if methods is None else list(methods)
    found = [with_degree("zigzag", 1)]
    for name in wanted:
        if name == megatron_hybrid.name:
            found += hybrid_candidates(lengths, topology)
        else:
            degrees = _degrees(find_method(name), shape, topology)
            found += [with_degree(name, degree, heads) for degree, heads in degrees]
    return [solver.fitted(shape, topology) for solver in found]


def _degrees(
    method: Method, shape: AttentionShape, topology: Topology
) -> Iterator[tuple[int, int | None]]:
    """Group sizes above 1, each with the head degrees that a method which splits heads can have
    there. These leave at least 2 contexts, unless the method splits nothing but heads."""
    kv_heads = shape.kv_heads if shape.exact else 1
    for degree in divisors(topology.num_ranks)[1:]:
        if method.heads_over is None:
            if not method.by_node or degree > topology.ranks_per_node:
                yield degree, None
            continue
        for heads in divisors(kv_heads)[1:]:
            fits = heads == degree if method.only_heads else heads < degree
            if fits and degree % heads == 0:
                yield degree, heads


def place_uncut(graph: BlockGraph, topology: Topology, _limits: Limits, _seed: int) -> Placement:
    """Deals whole sequences to ranks: nothing is sent, and balance is not guaranteed."""
    rank = deal_sequences(graph, topology.num_ranks)[graph.blocks.sequence]
    return Placement.where_queries_live(graph, topology.num_ranks, rank, "uncut", static=False)


uncut = Solver("uncut", place_uncut, choose_sizes_by_work)
