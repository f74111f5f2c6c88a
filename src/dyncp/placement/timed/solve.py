"""Improves a placement by moves, as long as they shorten the estimated step."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64, frozen, starts_of
from dyncp.blocks import BlockGraph, Payload
from dyncp.placement.placement import Limits, Placement, measure_balance
from dyncp.placement.timed.estimate import HIGH, LOW, StepEstimate, estimate
from dyncp.placement.timed.sweep import make_unit, sweep
from dyncp.topology import Topology

# Most sweeps with a low and with a high power of means.
SWEEPS = ((LOW, 4), (HIGH, 3))
# Larger tables of edges and ranks are not made.
MOST_COUNTS = 1 << 26


@dataclass(frozen=True, eq=False)
class Prices:
    """What placements are priced by. Per mask: seconds of every tile, [tiles, 2] forward and
    backward (0 where not planned), and how many layers have it. `token_seconds` is a token's work
    outside attention."""

    tile_seconds: Mapping[str, Float64]
    layers: Mapping[str, float]
    token_seconds: float = 0.0
    forward_only: bool = False


def improve(
    graph: BlockGraph,
    placement: Placement,
    topology: Topology,
    limits: Limits,
    prices: Prices,
    worth: float = 1.0,
    least: float = 0.0,
) -> Placement | None:
    """A placement with a shorter estimated step; blocks travel only where they are used. Limits
    that are kept stay so. None where nothing was found, or where the step is estimated to take less
    than `worth` times the computation alone, or than `least` seconds."""
    if _num_edges(graph) * topology.num_ranks > MOST_COUNTS:
        return None
    step = _make_estimate(graph, placement, topology, limits, prices)
    start = estimate(step, HIGH)
    if start < max(worth * _alone(step), least / _unit(prices, topology)):
        return None
    unit = make_unit(step)
    _, end = (sweep(step, unit, most, power) for power, most in SWEEPS)
    if end >= start and not placement.static:
        return None
    found = _placement(graph, step)
    # Shares of ranks of different speeds move with the mean.
    after, before = (
        measure_balance(graph, own, limits, topology.rank_speeds) for own in (found, placement)
    )
    return found if after.missed <= before.missed else None


def _placement(graph: BlockGraph, step: StepEstimate) -> Placement:
    ends = np.cumsum([len(tiles) for tiles in graph.tiles.values()])[:-1]
    parts = np.split(step.tile_rank, ends)
    tile_rank = {name: frozen(own) for name, own in zip(graph.tiles, parts, strict=True)}
    return Placement(len(step.slow), frozen(step.block_rank), tile_rank, "timed", static=False)


def _unit(prices: Prices, topology: Topology) -> float:
    """What estimates count seconds in."""
    total = sum(float(seconds.sum()) for seconds in prices.tile_seconds.values())
    return max(total / topology.num_ranks, 1e-12)


def _alone(step: StepEstimate) -> float:
    """The estimate if nothing travelled and all were level."""
    return float((step.weight * step.busy[:, : len(step.slow)].mean(axis=1)).sum())


def _make_estimate(
    graph: BlockGraph, placement: Placement, topology: Topology, limits: Limits, prices: Prices
) -> StepEstimate:
    names, blocks, groups = list(graph.tiles), len(graph.blocks), len(graph.head_groups)
    ranks, edges = topology.num_ranks, _num_edges(graph)
    tile = np.concatenate([_edges(graph, mask, name) for mask, name in enumerate(names)])
    seconds = np.concatenate([prices.tile_seconds[name] for name in names])
    work = np.concatenate([graph.tile_work(name) for name in names])
    unit = _unit(prices, topology)
    both = np.concatenate([tile[:, 0], tile[:, 1]])
    tokens = graph.blocks.tokens.astype(np.float64)
    rows = 2 * len(names) + 1
    size = _bytes(graph, forward_only=prices.forward_only)
    bandwidth = np.array([topology.intra.bandwidth, topology.inter.bandwidth])
    return StepEstimate(
        tile=tile,
        cost=np.column_stack([seconds / unit, work]),
        start=starts_of(np.bincount(both, minlength=edges)),
        members=np.argsort(both, kind="stable") % max(len(tile), 1),
        edge=_edge_table(len(names), blocks, groups),
        size=np.tile(size[:, None] / bandwidth[:, None] / unit, (len(names), 1, 1)),
        node=np.arange(ranks) // topology.ranks_per_node,
        slow=1 / topology.rank_speeds,
        tokens=np.column_stack([tokens, prices.token_seconds / unit * tokens]),
        weight=np.append(
            np.repeat([float(prices.layers[name]) for name in names], 2),
            float(prices.token_seconds > 0),
        ),
        sizes=np.array([topology.ranks_per_node, blocks, groups, len(names)]),
        span=_spans(graph),
        most=_most(graph, topology, limits, float(work.sum())),
        tile_rank=np.concatenate([placement.tile_rank[name] for name in names]).astype(np.int64),
        block_rank=placement.block_rank.astype(np.int64),
        pins=np.zeros((edges, ranks), np.int32),
        users=np.zeros((edges, topology.nodes), np.int32),
        busy=np.zeros((rows, 3 * ranks + 2 * topology.nodes)),
        held=np.zeros((ranks, 2)),
    )


def _num_edges(graph: BlockGraph) -> int:
    return 2 * len(graph.tiles) * len(graph.blocks) * len(graph.head_groups)


def _edges(graph: BlockGraph, mask: int, name: str) -> Int64:
    tiles, blocks, groups = graph.tiles[name], len(graph.blocks), len(graph.head_groups)
    sides = (tiles.q_block, tiles.k_block)
    q, k = (
        ((2 * mask + side) * blocks + block.astype(np.int64)) * groups + tiles.head_group
        for side, block in enumerate(sides)
    )
    return np.column_stack([q, k, np.full(len(q), mask)])


def _edge_table(masks: int, blocks: int, groups: int) -> Int64:
    """Block and forward row of every edge."""
    edge = np.arange(2 * masks * blocks * groups)
    return np.column_stack([edge // groups % blocks, edge // (2 * blocks * groups) * 2])


def _bytes(graph: BlockGraph, *, forward_only: bool) -> Float64:
    """Of the edges of one mask: to a user and back, forward and backward."""
    per_token = graph.payload_bytes.astype(np.float64)
    sides = np.zeros((2, per_token.shape[1], 4))
    sides[0] = per_token[[Payload.Q, Payload.Q_DOUT, Payload.OUT, Payload.DQ]].T
    sides[1, :, [0, 1, 3]] = per_token[[Payload.KV, Payload.KV, Payload.DKV]]
    if forward_only:
        sides[:, :, [1, 3]] = 0
    size: Float64 = sides[:, None] * graph.blocks.tokens[None, :, None, None]
    return size.reshape(-1, 4)


def _spans(graph: BlockGraph) -> Int64:
    sequence = graph.blocks.sequence
    first = np.searchsorted(sequence, np.arange(len(graph.batch.lengths) + 1))
    return np.column_stack([first[sequence], first[sequence + 1]]).astype(np.int64)


def _most(graph: BlockGraph, topology: Topology, limits: Limits, work: float) -> Float64:
    """Tokens and work that a rank may have."""
    ranks, speed = topology.num_ranks, topology.rank_speeds / topology.rank_speeds.mean()
    tokens, compute = (
        np.inf if tolerance is None else mean * (1 + tolerance)
        for mean, tolerance in (
            (graph.batch.num_tokens / ranks, limits.token_tolerance),
            (work / ranks, limits.compute_tolerance),
        )
    )
    return np.column_stack([np.full(ranks, tokens), compute * speed])
