"""Placements improved by moves, against an estimate that is counted anew in plain Python."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import Q_KINDS, BlockGraph, Direction, Payload, build_graph
from dyncp.placement import (
    Limits,
    Placement,
    Prices,
    check_placement,
    find_solver,
    improve,
    measure_balance,
)
from dyncp.topology import Link
from sizes import draws

SHAPE = AttentionShape(4, 2, 64)
MASKS = {
    "causal": masks.causal,
    "lambda": lambda n: masks.lambda_shaped(n, sinks=4, window=48),
    "blockwise": lambda n: masks.causal_blockwise(n, block=16),
    "full": masks.full,
}
PAIR_SECONDS = 1e-9


def graph_of(lengths, names, block_size, groups=1) -> BlockGraph:
    batch = Batch.of([{name: MASKS[name](n) for name in names} for n in lengths])
    return build_graph(batch, SHAPE, [block_size] * len(lengths), groups)


def slow(nodes: int, ranks: int, **options) -> Topology:
    return Topology(nodes, ranks, Link(1e-5, 4e8), Link(2e-5, 1e8), 1, **options)


def prices_of(graph: BlockGraph, layers=None, token_seconds=0.0) -> Prices:
    seconds = {
        name: np.outer(graph.tile_work(name), [PAIR_SECONDS, 2.5 * PAIR_SECONDS])
        for name in graph.tiles
    }
    layers = layers or dict.fromkeys(graph.tiles, 1.0)
    return Prices(seconds, layers, token_seconds)


def power_mean(values: list[float]) -> float:
    most = max(values, default=0.0)
    if most <= 0:
        return 0.0
    shares = [value / most for value in values if value > 0.7 * most]
    return most * sum(share**32 for share in shares) ** (1 / 32)


def estimate(graph: BlockGraph, placement: Placement, topology: Topology, prices: Prices) -> float:
    """Counted from sets of users, one block and rank at a time."""
    total, slower = 0.0, 1 / topology.rank_speeds
    node = [topology.node_of(rank) for rank in range(topology.num_ranks)]
    for name, direction in itertools.product(graph.tiles, Direction):
        tiles, tile_rank = graph.tiles[name], placement.tile_rank[name]
        compute = np.bincount(
            tile_rank, prices.tile_seconds[name][:, direction], topology.num_ranks
        )
        ports = dict.fromkeys(itertools.product(("in", "out"), range(topology.num_ranks)), 0.0)
        nics = dict.fromkeys(itertools.product(("in", "out"), range(topology.nodes)), 0.0)
        back = {Direction.FORWARD: None, Direction.BACKWARD: Payload.DKV}[direction]
        kinds = ((tiles.q_block, *Q_KINDS[direction]), (tiles.k_block, Payload.KV, back))
        for blocks, there, result in kinds:
            uses = {
                tuple(use) for use in np.stack([blocks, tiles.head_group, tile_rank], 1).tolist()
            }
            crossed = set()
            for block, group, user in uses:
                owner = int(placement.block_rank[block])
                if user == owner:
                    continue
                tokens = int(graph.blocks.tokens[block])
                sent = tokens * graph.payload_bytes[there, group]
                returned = 0 if result is None else tokens * graph.payload_bytes[result, group]
                if topology.ranks_per_node > 1:
                    speed = topology.intra.bandwidth
                    ports["in", user] += sent / speed
                    ports["out", user] += returned / speed
                    if node[user] == node[owner]:
                        ports["out", owner] += sent / speed
                        ports["in", owner] += returned / speed
                if node[user] == node[owner] or (block, group, node[user]) in crossed:
                    continue
                crossed.add((block, group, node[user]))
                speed = topology.inter.bandwidth
                nics["in", node[user]] += sent / speed
                nics["out", node[owner]] += sent / speed
                nics["out", node[user]] += returned / speed
                nics["in", node[owner]] += returned / speed
        busiest = [
            power_mean(list(own)) for own in (compute * slower, ports.values(), nics.values())
        ]
        total += prices.layers[name] * (max(busiest) + sum(busiest)) / 2
    held = np.bincount(placement.block_rank, graph.blocks.tokens, topology.num_ranks)
    return total + power_mean(list(prices.token_seconds * held * slower))


@st.composite
def placed_batches(draw):
    names = draw(st.lists(st.sampled_from(sorted(MASKS)), min_size=1, max_size=2, unique=True))
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=8))
    graph = graph_of(lengths, names, draw(st.sampled_from([16, 40])), draw(st.sampled_from([1, 2])))
    topology = slow(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    if draw(st.booleans()):
        topology = topology.jittered(0.5, 1)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks = topology.num_ranks
    block_rank = random.integers(ranks, size=len(graph.blocks)).astype(np.int32)
    at_home = draw(st.booleans())
    tile_rank = {
        name: block_rank[tiles.q_block]
        if at_home
        else random.integers(ranks, size=len(tiles)).astype(np.int32)
        for name, tiles in graph.tiles.items()
    }
    return graph, topology, Placement(ranks, block_rank, tile_rank, "drawn", static=False)


@draws(60, suppress_health_check=list(HealthCheck))
@given(placed_batches(), st.sampled_from([0.0, 1e-6]))
def test_the_estimated_step_gets_shorter(batch, token_seconds):
    graph, topology, placement = batch
    layers = {name: 1.0 + 2 * number for number, name in enumerate(graph.tiles)}
    prices = prices_of(graph, layers, token_seconds)
    found = improve(graph, placement, topology, Limits(), prices)
    if found is not None:
        check_placement(graph, found)
        before, after = (estimate(graph, own, topology, prices) for own in (placement, found))
        assert after < before


@draws(30, suppress_health_check=list(HealthCheck))
@given(placed_batches(), st.floats(0, 1), st.floats(0, 1))
def test_limits_that_are_kept_stay_so(batch, compute, tokens):
    graph, topology, placement = batch
    start = measure_balance(graph, placement, Limits(), topology.rank_speeds)
    limits = Limits(
        start.compute_max_over_mean - 1 + compute, start.tokens_max_over_mean - 1 + tokens
    )
    found = improve(graph, placement, topology, limits, prices_of(graph))
    if found is not None:
        assert measure_balance(graph, found, limits, topology.rank_speeds).missed < 1e-6


def all_on(graph: BlockGraph, rank: int, ranks: int) -> Placement:
    block_rank = np.full(len(graph.blocks), rank, np.int32)
    return Placement.where_queries_live(graph, ranks, block_rank, "one", static=False)


def test_whole_documents_are_spread_and_not_cut_where_links_are_slow():
    graph = graph_of([64] * 8, ["causal"], 16)
    topology = Topology(4, 1, Link(1e-5, 1e6), Link(1e-5, 1e6), 1)
    found = improve(graph, all_on(graph, 0, 4), topology, Limits(), prices_of(graph))
    ranks_of = [set(found.block_rank[graph.blocks.sequence == s].tolist()) for s in range(8)]
    assert all(len(ranks) == 1 for ranks in ranks_of)
    assert sorted(rank for ranks in ranks_of for rank in ranks) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_document_is_cut_where_links_are_fast():
    graph = graph_of([512, 16], ["causal"], 16)
    topology = Topology(1, 4, Link(0, 1e15), Link(0, 1e15), 1)
    found = improve(graph, all_on(graph, 0, 4), topology, Limits(), prices_of(graph))
    assert measure_balance(graph, found, Limits()).compute_max_over_mean < 1.15


def test_nothing_is_moved_where_links_do_not_matter():
    graph = graph_of([128] * 4, ["causal"], 128)
    placement = find_solver("owner_computes").place(graph, slow(2, 2), Limits(), 0)
    prices = prices_of(graph)
    assert improve(graph, placement, slow(2, 2), Limits(), prices) is None
    assert improve(graph, all_on(graph, 0, 4), slow(2, 2), Limits(), prices, worth=100) is None


@pytest.mark.parametrize("method", ["zigzag", "ulysses"])
def test_a_static_placement_is_a_start_like_any_other(method):
    graph = graph_of([200, 90, 70], ["causal"], 20, 2 if method == "ulysses" else 1)
    solver = find_solver(method if method == "zigzag" else "ulysses/cp2")
    placement = solver.place(graph, slow(2, 2), Limits(), 0)
    found = improve(graph, placement, slow(2, 2), Limits(), prices_of(graph))
    assert found.pattern == "minimal"
    assert not found.static
