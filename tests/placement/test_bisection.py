"""The bisection solver, by its properties."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import BlockGraph, Direction, build_graph, choose_block_sizes
from dyncp.placement import (
    Limits,
    Placement,
    check_placement,
    find_remote_uses,
    measure_balance,
    minimal_bytes,
)
from dyncp.placement.bisection import bisection, bisection_bytes
from dyncp.placement.bisection.polish import Links, make_pins, polish, start_from
from dyncp.placement.bisection.problem import make_problem
from dyncp.placement.bisection.recurse import Budget, bisect, halve
from strategies import masks_of

SHAPE = AttentionShape(8, 2, 128)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
# Long-tailed batches: lognormal lengths.
LONG_TAILED = [
    np.random.default_rng(seed).lognormal(np.log(3000), 1.3, 24).clip(256, 40000).astype(int)
    for seed in range(4)
]


def graph_of(lengths, mask=masks.causal, num_ranks=16, block_size=None) -> BlockGraph:
    lengths = [int(n) for n in lengths]
    sizes = (
        choose_block_sizes(lengths, num_ranks)
        if block_size is None
        else [block_size] * len(lengths)
    )
    return build_graph(Batch.of([mask(n) for n in lengths]), SHAPE, [int(n) for n in sizes])


def place(graph: BlockGraph, topology: Topology, limits: Limits | None = None) -> Placement:
    placement = bisection.place(graph, topology, limits or Limits(0.1, 0.2), 0)
    check_placement(graph, placement)
    return placement


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    machines=st.integers(1, 3),
    ranks=st.integers(1, 5),
)
def test_any_batch_gets_a_total_map_that_depends_on_its_arguments_only(
    data, lengths, machines, ranks
):
    chosen = [data.draw(masks_of(n)) for n in lengths]
    sizes = [data.draw(st.integers(1, 20)) for _ in lengths]
    graph = build_graph(Batch.of(chosen), SHAPE, sizes)
    first, second = (place(graph, Topology(machines, ranks)) for _ in range(2))
    assert (first.block_rank == second.block_rank).all()
    assert (first.tile_rank["default"] == second.tile_rank["default"]).all()


@pytest.mark.parametrize("mask", [masks.causal, masks.lambda_shaped, masks.shared_question])
@pytest.mark.parametrize("lengths", [*LONG_TAILED, [65536], [4096] * 16], ids=str)
def test_both_limits_hold_on_long_tailed_single_and_uniform_batches(lengths, mask):
    graph = graph_of(lengths, mask, block_size=1024)
    placement = place(graph, Topology(2, 8))
    balance = measure_balance(graph, placement, Limits(0.1, 0.2))
    assert not balance.reason, balance.reason


@pytest.mark.parametrize("lengths", LONG_TAILED, ids=str)
def test_fewer_bytes_move_than_under_any_fixed_order(lengths):
    graph = graph_of(lengths, block_size=1024)
    placement = bisection_bytes.place(graph, Topology(2, 8), Limits(0.1, 0.2), 0)
    ours = minimal_bytes(graph, placement, "default", Direction.FORWARD)
    order = np.argsort(np.arange(len(graph.blocks)) % 16, kind="stable")
    dealt = np.empty(len(graph.blocks), np.int64)
    dealt[order] = np.arange(len(order)) * 16 // len(order)
    fixed = Placement.where_queries_live(graph, 16, dealt, "dealt", static=False)
    assert ours < 0.5 * minimal_bytes(graph, fixed, "default", Direction.FORWARD)


def test_sequences_that_fit_are_never_cut():
    graph = graph_of([4096] * 16, block_size=1024)
    placement = place(graph, Topology(2, 8))
    assert minimal_bytes(graph, placement, "default", Direction.BACKWARD) == 0


@pytest.mark.parametrize("lengths", LONG_TAILED, ids=str)
def test_links_between_machines_are_spared(lengths):
    graph, topology = graph_of(lengths, block_size=1024), Topology(4, 4)
    between = []
    for solver in (bisection, bisection_bytes):
        placement = solver.place(graph, topology, Limits(0.1, 0.2), 0)
        uses = find_remote_uses(graph, placement, "default", graph.tiles["default"].k_block)
        crosses = placement.block_rank[uses.block] // 4 != uses.rank // 4
        between.append(int(graph.blocks.tokens[uses.block][crosses].sum()))
    assert between[0] <= between[1]


def test_machines_are_split_before_ranks():
    graph = graph_of([8192] * 4, block_size=512)
    placement = place(graph, Topology(4, 4))
    uses = find_remote_uses(graph, placement, "default", graph.tiles["default"].k_block)
    assert (placement.block_rank[uses.block] // 4 == uses.rank // 4).all()


def test_topologies_halve_along_machines():
    assert [t.num_ranks for t in halve(Topology(3, 8))] == [8, 16]
    assert [t.num_ranks for t in halve(Topology(1, 7))] == [3, 4]


def test_tight_limits_are_met_where_blocks_are_fine_enough():
    graph = graph_of([30000, 9000, 5000, 2000, 1000], block_size=128, num_ranks=8)
    limits = Limits(0.02, 0.05)
    balance = measure_balance(graph, place(graph, Topology(1, 8), limits), limits)
    assert not balance.reason, balance.reason


def test_polishing_never_costs_bytes_on_a_balanced_start():
    graph = graph_of([16384], block_size=512, num_ranks=8)
    problem, ranks = make_problem(graph), 8
    mean = np.array([problem.work.sum(), problem.tokens.sum()]) / ranks
    loose = Budget(mean, np.array([10.0, 10.0]), 1.0)
    tight = Budget(mean, np.array([0.1, 0.2]), 1.0)
    cells = bisect(problem, Topology(1, ranks), tight)
    pins = make_pins(problem)
    links = Links(np.zeros(ranks, np.int64), 1.0)
    start = start_from(pins, problem, cells, loose.caps, links)
    before = start.cost
    assert polish(start).cost <= before


def test_several_masks_share_owners_and_both_are_placed():
    named = [{"default": masks.causal(n), "local": masks.sliding_window(n, window=64)}
             for n in (3000, 800, 500)]  # fmt: skip
    graph = build_graph(Batch.of(named), SHAPE, [128, 800, 500])
    placement = place(graph, Topology(1, 4))
    assert set(placement.tile_rank) == {"default", "local"}
