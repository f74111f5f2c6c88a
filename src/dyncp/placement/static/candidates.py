"""Static methods as solvers: with given degrees, or all degrees that ranks and heads allow."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import AttentionShape, BlockGraph
from dyncp.placement.placement import Limits, Placement
from dyncp.placement.solver import Degrees, Solver
from dyncp.placement.static.grid import Grid, deal_loads, divisors, sequence_load
from dyncp.placement.static.hybrid import (
    contiguous_ranks,
    deal_documents,
    group_sizes,
    hybrid_candidates,
    hybrid_shares,
    hybrid_with_budget,
    megatron_hybrid,
    ring_seconds,
)
from dyncp.placement.static.methods import METHODS, Method
from dyncp.topology import Topology

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


# Chunks end on whole tokens, and work inside a block is taken to be even: estimates from chunks
# count with this share, and not at all for sequences that have few tokens per rank.
CERTAIN, SHORT = 0.95, 8
# Share of all pairs that causal masks allow at least.
DENSE = 0.5


# What a static method needs at least, from the loads of sequences alone.
#
# Whole sequences are dealt to groups of ranks. Methods that cut every sequence by itself give each
# rank of a group the same chunks of all of them, so its work follows from the work of chunks; those
# that balance chunks are at best even. How keys travel bounds the divisions, and the bytes on the
# busiest link.


@dataclass(frozen=True, slots=True)
class Bound:
    """Least shares of the batch's work and tokens on the fullest rank, the kernel calls that it
    makes at least, and the seconds that communication takes at least: forward, per byte of a
    token's keys and values, and per byte of a token that goes to other heads' ranks or back."""

    work: float
    tokens: float
    calls: int
    seconds_per_byte: float
    swap_seconds_per_byte: float = 0.0


class StaticBounds:
    """Bounds of static methods for one batch; `graph` is any graph of it."""

    def __init__(self, graph: BlockGraph, topology: Topology) -> None:
        self._graph, self._topology = graph, topology
        self._lengths, self._num_tokens = graph.batch.lengths, graph.batch.num_tokens
        self._is_long = np.asarray(self._lengths) >= SHORT * topology.num_ranks
        # Causal or more: the last rows of a sequence use the keys of all ranks, hop after hop.
        self._is_dense = self._is_long.copy()
        for pairs, rows in (whole_rows(graph, name) for name in graph.tiles):
            self._is_dense &= pairs >= DENSE * rows**2
        self._load = np.ascontiguousarray(sequence_load(graph)[:, ::-1])  # work, tokens
        self._row_work = graph.row_work / max(float(graph.row_work.sum()), 1.0)
        self._deal = cache(lambda groups: deal_loads(self._load, groups))
        self._chunks = cache(self._chunk_work)

    def of(self, degrees: Degrees) -> Bound:
        """Of a static method with these degrees."""
        if degrees.method not in METHODS:
            return self._hybrid(degrees.tokens)
        method = METHODS[degrees.method]
        degree = degrees.ranks or self._topology.num_ranks
        heads = degree if method.only_heads else degrees.heads or 1
        groups = self._topology.num_ranks // degree
        group = self._deal(groups)
        columns = [np.bincount(group, own, groups) for own in self._load.T]
        share = np.stack(columns, axis=1).astype(np.float64)
        tokens = float(share[:, 1].max())
        return Bound(
            self._work(method, share, degree, heads),
            tokens / degree,
            degree // heads if method.pattern == "ring" and self._every_rank(share) else 1,
            self._seconds_per_byte(method, tokens * self._num_tokens, degree, heads),
            self._swap_seconds_per_byte(method, tokens * self._num_tokens, degree, heads),
        )

    def _every_rank(self, share: Float64) -> bool:
        """Whether ranks use the keys of all ranks of their group, whichever group has most work."""
        return bool(self._is_dense.any() if len(share) == 1 else self._is_dense.all())

    def _work(self, method: Method, share: Float64, degree: int, heads: int) -> float:
        contexts, even = degree // heads, float(share[:, 0].max()) / degree
        if method.spread is None or contexts == 1 or not self._is_long.any():
            return even
        halves = 1 if method.spread is contiguous_ranks else 2
        chunks = self._chunks(halves * contexts)
        if halves == 2:
            chunks = chunks[:, :contexts] + chunks[:, : contexts - 1 : -1]
        place = self._deal(len(share))[:, None] * contexts + np.arange(contexts)
        by_rank = np.bincount(place.ravel(), chunks.ravel())
        return max(even, CERTAIN * float(by_rank.max()) / heads)

    def _chunk_work(self, count: int) -> Float64:
        """Share of the batch's work in each of `count` chunks of every long sequence. Blocks that
        span chunks are shared out by length."""
        # One running sum per sequence s, over [2 s, 2 s + 1].
        blocks, lengths = self._graph.blocks, np.asarray(self._lengths, np.float64)
        sequence, sums = blocks.sequence, np.cumsum(self._row_work)
        first = np.searchsorted(sequence, np.arange(len(lengths)))
        before = np.append(0, sums)[first]
        ends = np.insert(
            2 * sequence + blocks.end / lengths[sequence], first, 2 * np.arange(len(first))
        )
        sums = np.insert(sums - before[sequence], first, 0)
        at = 2 * np.arange(len(lengths))[:, None] + np.arange(count + 1) / count
        work = np.diff(np.interp(at.ravel(), ends, sums).reshape(at.shape), axis=1)
        return np.where(self._is_long[:, None], work, 0.0)

    def _hybrid(self, tokens: int | None) -> Bound:
        ranks = self._topology.num_ranks
        if not self._is_long.all():
            return Bound(1 / ranks, 1 / ranks, 1, 0.0)
        sizes = group_sizes(self._lengths, ranks, tokens)
        first = deal_documents(self._load, sizes, ranks)
        work, held = CERTAIN * hybrid_shares(self._load, sizes, first, ranks).max(axis=0)
        travels = ring_seconds(self._lengths, sizes, first, self._topology)
        return Bound(float(work), float(held), 1, travels)

    def _seconds_per_byte(
        self, method: Method, group_tokens: float, degree: int, heads: int
    ) -> float:
        """Per byte of one token's keys and values; a group has `group_tokens`."""
        topology, contexts = self._topology, degree // heads
        spans = degree > topology.ranks_per_node
        if method.pattern == "ring":
            # Hop after hop, over the border where a ring spans nodes.
            crosses = spans and (not method.context_first or contexts > topology.ranks_per_node)
            bandwidth = topology.nic_bandwidth if crosses else topology.intra.bandwidth
            return (contexts - 1) * group_tokens / contexts / heads / bandwidth
        if method.pattern == "all_gather" and spans:
            # What a node does not own comes over its border, for each of its ranks or once.
            nodes = degree / topology.ranks_per_node
            copies = 1 if method.by_node else topology.ranks_per_node
            return copies * group_tokens * (1 - 1 / nodes) / topology.inter.bandwidth
        return 0.0

    def _swap_seconds_per_byte(
        self, method: Method, group_tokens: float, degree: int, heads: int
    ) -> float:
        """Rings of heads: what ranks own and other nodes compute with leaves over the NICs of a
        group, and so do its results."""
        topology = self._topology
        if method.pattern != "ring" or heads == 1 or degree <= topology.ranks_per_node:
            return 0.0
        ranks = Grid.of(topology, degree, heads, method.context_first, method.name).ranks
        node = ranks // topology.ranks_per_node
        far = (node[..., :, None] != node[..., None, :]).mean(axis=(1, 2, 3)).min()
        nics = max(len(np.unique(own)) for own in ranks // topology.ranks_per_nic)
        return float(far) * group_tokens / nics / topology.nic_bandwidth


def whole_rows(graph: BlockGraph, name: str) -> tuple[Int64, Int64]:
    """Pairs and length of every sequence under mask `name`."""
    tiles = graph.tiles[name]
    lengths = np.asarray(graph.batch.lengths, np.int64)
    pairs = np.bincount(graph.blocks.sequence[tiles.q_block], tiles.pairs, len(lengths))
    return (pairs / len(graph.head_groups)).astype(np.int64), lengths


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
