"""The static methods, as the choices they consist of."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dyncp.arrays import Int64, frozen
from dyncp.blocks import AttentionShape, BlockGraph
from dyncp.placement.megatron_hybrid import hybrid_candidates, hybrid_with_budget, megatron_hybrid
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.solver import Degrees, Solver
from dyncp.placement.static_layouts import (
    Deal,
    Grid,
    Spread,
    contiguous_ranks,
    contiguous_sizes,
    divisors,
    heap_ranks,
    nodes_of,
    on_grid,
    packed_sizes,
    place_packed,
    place_spread,
    snake_ranks,
    traffic_on,
    zigzag_ranks,
    zigzag_sizes,
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


_DEGREES = re.compile(r"(?:cp(\d+))?(?:h(\d+))?")
_BUDGET = re.compile(r"tokens(\d+)")


# Static solvers by name: "zigzag", "zigzag/cp8", "loongtrain/cp8h2", "megatron_hybrid".


def static_solver(name: str) -> Solver:
    """The solver that has this name; ValueError if there is none."""
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


def with_degree(method: str, degree: int | None = None, heads: int | None = None) -> Solver:
    """`method` in groups of `degree` ranks (None: all) with `heads` of them side by side.

    With fewer ranks in a group than there are, whole sequences are dealt to the groups: DP × CP.
    `with_degree("zigzag", 8)` is called "zigzag/cp8", `with_degree("loongtrain", 8, 2)`
    "loongtrain/cp8h2". Without `heads`, a method that splits heads takes as many as kv heads and
    ranks allow.
    """
    chosen = _method(method)
    degree, heads = _complete(chosen, degree, heads)
    name = _name(chosen, degree, heads)
    return Solver(
        name,
        partial(_place, chosen, degree, heads, name),
        partial(_block_sizes, chosen, degree),
        head_groups=heads,
        fit=partial(_fit, chosen, degree, heads),
        degrees=Degrees(method, degree, heads),
    )


def _method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"static method is {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def _complete(
    method: Method, degree: int | None, heads: int | None
) -> tuple[int | None, int | None]:
    """A method of heads alone has as many ranks in a group as heads."""
    if heads not in (None, 1) and not method.splits_heads:
        raise ValueError(f"{method.name} does not split heads; got heads={heads}")
    if method.only_heads:
        if None not in (degree, heads) and degree != heads:
            raise ValueError(
                f"{method.name} gives every rank of a group its own heads; got degree={degree} "
                f"and heads={heads}, which must be equal"
            )
        degree = heads = degree if heads is None else heads
    return degree, heads if method.splits_heads else None


def _name(method: Method, degree: int | None, heads: int | None) -> str:
    degrees = "" if degree is None else f"cp{degree}"
    if heads is not None and not method.only_heads:
        degrees += f"h{heads}"
    return f"{method.name}/{degrees}" if degrees else method.name


def _place(
    method: Method,
    degree: int | None,
    heads: int | None,
    name: str,
    graph: BlockGraph,
    topology: Topology,
    _limits: Limits,
    _seed: int,
) -> Placement:
    if heads is None:
        heads = len(graph.head_groups) if method.splits_heads else 1
    if heads > 1 and heads != len(graph.head_groups):
        raise ValueError(
            f"{name} needs the heads in {heads} groups; the graph has {len(graph.head_groups)}"
        )
    if degree is None:
        degree = heads if method.only_heads else topology.num_ranks
    grid = Grid.of(topology, degree, heads, method.context_first, name)
    return method.place(graph, topology, grid, name)


def _block_sizes(
    method: Method, degree: int | None, lengths: Sequence[int], num_ranks: int
) -> Int64:
    return method.block_sizes(lengths, num_ranks if degree is None else degree, num_ranks)


def _fit(
    method: Method,
    degree: int | None,
    heads: int | None,
    shape: AttentionShape,
    topology: Topology,
) -> Solver:
    """The solver with a head degree that suits the model; ValueError where there is none."""
    given = with_degree(method.name, degree, heads)
    if method.splits_heads and heads is None:
        best = method.default_heads(shape, topology)
        best = max(d for d in divisors(best) if (degree or topology.num_ranks) % d == 0)
        given = with_degree(method.name, degree, best)
    _check(method, degree, given.head_groups or 1, given.name, shape, topology)
    return replace(given, fit=None)


def _check(
    method: Method,
    degree: int | None,
    heads: int,
    name: str,
    shape: AttentionShape,
    topology: Topology,
) -> None:
    if heads > 1 and not shape.exact:
        raise ValueError(f"{name} splits heads; give the attention shape (model=) to use it")
    if shape.kv_heads % heads:
        raise ValueError(
            f"{name} needs {heads} groups of equally many kv heads; the model has "
            f"{shape.kv_heads}, so allowed are {', '.join(map(str, divisors(shape.kv_heads)))}"
        )
    if degree is None:
        degree = heads if method.only_heads else topology.num_ranks
    Grid.of(topology, degree, heads, method.context_first, name)


def static_candidates(
    lengths: Sequence[int],
    shape: AttentionShape,
    topology: Topology,
    methods: Sequence[str] | None = None,
) -> list[Solver]:
    """Every static method (or only `methods`) with every DP × CP split and head degree.

    Data parallelism alone, which is the same for all methods, stands for all of them once, as
    "zigzag/cp1". On 4 ranks with 2 kv heads, for zigzag and loongtrain:

        zigzag/cp1  zigzag/cp2  zigzag/cp4  loongtrain/cp4h2
    """
    wanted = [*METHODS, megatron_hybrid.name] if methods is None else list(methods)
    found = [with_degree("zigzag", 1)]
    for name in wanted:
        if name == megatron_hybrid.name:
            found += hybrid_candidates(lengths, topology)
        else:
            degrees = _degrees(_method(name), shape, topology)
            found += [with_degree(name, degree, heads) for degree, heads in degrees]
    return [solver.fitted(shape, topology) for solver in found]


def _degrees(
    method: Method, shape: AttentionShape, topology: Topology
) -> Iterator[tuple[int, int | None]]:
    """Group sizes above 1, and where heads are split, head degrees that leave a second dimension
    (unless the method has none)."""
    kv_heads = shape.kv_heads if shape.exact else 1
    for degree in divisors(topology.num_ranks)[1:]:
        if not method.splits_heads:
            if not method.by_node or degree > topology.ranks_per_node:
                yield degree, None
            continue
        for heads in divisors(kv_heads)[1:]:
            fits = heads == degree if method.only_heads else heads < degree
            if fits and degree % heads == 0:
                yield degree, heads


STATIC_SOLVERS = (*(with_degree(name) for name in METHODS), megatron_hybrid)
