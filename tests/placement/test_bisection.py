"""The bisection solver, by its properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import BlockGraph, Direction, build_graph, choose_block_sizes
from dyncp.placement import (
    Limits,
    Placement,
    bisection,
    bisection_bytes,
    bisection_bytes_quality,
    bisection_quality,
    check_placement,
    find_remote_uses,
    measure_balance,
    minimal_bytes,
)
from dyncp.placement.cuts import SplitStrategy
from dyncp.placement.problem import diagonal, find_cells, make_problem
from dyncp.placement.refine import make_state, refine, start_from
from dyncp.placement.split import halve, split_cells
from sizes import draws
from strategies import masks_of

SHAPE = AttentionShape(8, 2, 128)
LIMITS = Limits(0.1, 0.2)
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


@draws(60)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    nodes=st.integers(1, 3),
    ranks=st.integers(1, 5),
)
def test_any_batch_gets_a_total_map_that_depends_on_its_arguments_only(data, lengths, nodes, ranks):
    chosen = [data.draw(masks_of(n)) for n in lengths]
    sizes = [data.draw(st.integers(1, 20)) for _ in lengths]
    graph = build_graph(Batch.of(chosen), SHAPE, sizes)
    first, second = (place(graph, Topology(nodes, ranks)) for _ in range(2))
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
def test_links_between_nodes_are_spared(lengths):
    graph, topology = graph_of(lengths, block_size=1024), Topology(4, 4)
    between = []
    for solver in (bisection, bisection_bytes):
        placement = solver.place(graph, topology, Limits(0.1, 0.2), 0)
        uses = find_remote_uses(graph, placement, "default", keys=True)
        crosses = placement.block_rank[uses.block] // 4 != uses.rank // 4
        between.append(int(graph.blocks.tokens[uses.block][crosses].sum()))
    assert between[0] <= between[1]


def test_nodes_are_split_before_ranks():
    graph = graph_of([8192] * 4, block_size=512)
    placement = place(graph, Topology(4, 4))
    uses = find_remote_uses(graph, placement, "default", keys=True)
    assert (placement.block_rank[uses.block] // 4 == uses.rank // 4).all()


def test_topologies_halve_along_nodes():
    assert [t.num_ranks for t in halve(Topology(3, 8))] == [8, 16]
    assert [t.num_ranks for t in halve(Topology(1, 7))] == [3, 4]


def test_tight_limits_are_met_where_blocks_are_fine_enough():
    graph = graph_of([30000, 9000, 5000, 2000, 1000], block_size=128, num_ranks=8)
    limits = Limits(0.02, 0.05)
    balance = measure_balance(graph, place(graph, Topology(1, 8), limits), limits)
    assert not balance.reason, balance.reason


def test_refining_never_costs_bytes_on_a_balanced_start():
    graph, ranks = graph_of([16384], block_size=512, num_ranks=8), 8
    problem, topology = make_problem(graph), Topology(1, ranks)
    cells, mean = find_cells(problem), problem.mean(ranks)
    rank = split_cells(problem, topology, mean, np.array([0.1, 0.2]), SplitStrategy())[0]
    state = make_state(problem, cells, topology, 11 * mean, 0.0)
    start = start_from(state, *(rank[x].astype(np.int64) for x in (cells.cell, diagonal(problem))))
    assert refine(start.state).cost <= start.cost


def test_several_masks_share_owners_and_both_are_placed():
    named = [{"default": masks.causal(n), "local": masks.sliding_window(n, window=64)}
             for n in (3000, 800, 500)]  # fmt: skip
    graph = build_graph(Batch.of(named), SHAPE, [128, 800, 500])
    placement = place(graph, Topology(1, 4))
    assert set(placement.tile_rank) == {"default", "local"}


QUALITY = [bisection_quality, bisection_bytes_quality]


def forward_bytes(graph: BlockGraph, placement: Placement) -> int:
    return minimal_bytes(graph, placement, "default", Direction.FORWARD)


@draws(12)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    nodes=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_quality_effort_maps_all_heads_of_any_batch_and_depends_on_the_seed_only(
    data, lengths, nodes, seed
):
    chosen = [data.draw(masks_of(n)) for n in lengths]
    sizes = [data.draw(st.integers(1, 20)) for _ in lengths]
    graph = build_graph(Batch.of(chosen), SHAPE, sizes, data.draw(st.integers(1, 2)))
    solver = data.draw(st.sampled_from(QUALITY))
    first, second = (solver.place(graph, Topology(nodes, 3), LIMITS, seed) for _ in range(2))
    check_placement(graph, first)
    assert first.solver == solver.name
    assert (first.block_rank == second.block_rank).all()
    assert (first.tile_rank["default"] == second.tile_rank["default"]).all()


@pytest.mark.parametrize("lengths", LONG_TAILED, ids=str)
def test_quality_effort_moves_no_more_bytes_and_holds_both_limits(lengths):
    graph = graph_of(lengths, block_size=1024)
    fast, quality = (
        solver.place(graph, Topology(2, 8), LIMITS, 0)
        for solver in (bisection_bytes, bisection_bytes_quality)
    )
    assert not measure_balance(graph, quality, LIMITS).reason
    assert forward_bytes(graph, quality) <= 1.02 * forward_bytes(graph, fast)


@pytest.mark.parametrize("mask", [masks.causal, masks.shared_question])
def test_two_head_groups_need_fewer_bytes_for_a_sequence_over_many_ranks(mask):
    one, two = (build_graph(Batch.of([mask(65536)]), SHAPE, [512], groups) for groups in (1, 2))
    moved = []
    for graph in (one, two):
        placement = bisection_bytes.place(graph, Topology(4, 8), LIMITS, 0)
        assert not measure_balance(graph, placement, LIMITS).reason
        moved.append(forward_bytes(graph, placement))
    assert moved[1] < 0.95 * moved[0]


def test_short_sequences_keep_their_head_groups_together():
    graph = build_graph(Batch.of([masks.causal(4096)] * 16), SHAPE, [1024] * 16, 2)
    assert forward_bytes(graph, place(graph, Topology(2, 8))) == 0


def test_rows_that_attend_everything_are_computed_where_their_keys_live():
    graph = graph_of([65536], masks.causal_blockwise, block_size=512)
    placement = bisection_bytes.place(graph, Topology(2, 8), LIMITS, 0)
    tiles = graph.tiles["default"]
    last = tiles.q_block == tiles.q_block.max()
    at_home = placement.tile_rank["default"][last] == placement.block_rank[tiles.k_block[last]]
    assert at_home.mean() > 0.8


def test_a_border_between_nodes_is_charged_once_per_block():
    graph = graph_of([8192], block_size=512)
    problem = make_problem(graph)
    cells = find_cells(problem)
    state = make_state(problem, cells, Topology(2, 4), np.array([1e30, 1e30]), extra=4.0)
    tile_rank, block_rank = np.zeros(len(cells.cell), np.int64), np.zeros(16, np.int64)
    assert start_from(state, tile_rank, block_rank).cost == 0
    # The second row's tiles run on ranks of the other node: its Q and KV cross the border.
    tile_rank[cells.q_block == 1] = 4, 5
    block_rank[1] = 5
    moved = start_from(state, tile_rank, block_rank)
    q, kv = problem.q_bytes[1], problem.kv_bytes[1]
    # Block 1 lives on rank 5: rows on 4 and 5 of one node; keys on rank 0 and 5.
    first_keys = (1 + 4) * problem.kv_bytes[0]
    assert moved.cost == pytest.approx(q + (1 + 4) * kv + first_keys)


def test_the_bytes_that_solvers_count_are_those_of_the_placement():
    graph = graph_of(LONG_TAILED[0], block_size=1024)
    placement = bisection_bytes.place(graph, Topology(2, 8), LIMITS, 0)
    problem, tiles = make_problem(graph), graph.tiles["default"]
    uses = np.zeros((2 * len(problem.tokens), 16), bool)
    uses[tiles.q_block, placement.tile_rank["default"]] = True
    uses[tiles.k_block + len(problem.tokens), placement.tile_rank["default"]] = True
    uses[np.arange(len(uses)), np.tile(placement.block_rank, 2)] = True
    both = sum(minimal_bytes(graph, placement, "default", d) for d in Direction)
    size = np.append(problem.q_bytes, problem.kv_bytes)
    assert ((uses.sum(axis=1) - 1) * size).sum() == pytest.approx(both)
