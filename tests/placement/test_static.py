"""Static methods: who owns what, in which groups, and which degrees are possible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import BlockGraph, build_graph
from dyncp.placement import (
    SOLVERS,
    STATIC_SOLVERS,
    Limits,
    Placement,
    Solver,
    check_placement,
    find_solver,
    measure_balance,
    static_candidates,
    with_degree,
)
from dyncp.placement.megatron_hybrid import group_sizes
from dyncp.placement.static_layouts import (
    Grid,
    deal_sequences,
    divisors,
    heap_ranks,
    sequence_load,
    snake_ranks,
)
from sizes import draws

SHAPE = AttentionShape(8, 4, 16)


def place(
    solver: Solver, lengths: list[int], topology: Topology, shape: AttentionShape = SHAPE
) -> tuple[BlockGraph, Placement]:
    solver = solver.fitted(shape, topology)
    sizes = solver.block_sizes(lengths, topology.num_ranks).tolist()
    batch = Batch.of([masks.causal(n) for n in lengths])
    graph = build_graph(batch, shape, sizes, solver.head_groups or 1)
    return graph, solver.place(graph, topology, Limits(), 0)


def max_over_mean(graph: BlockGraph, placement: Placement) -> tuple[float, float]:
    balance = measure_balance(graph, placement, Limits())
    return balance.compute_max_over_mean, balance.tokens_max_over_mean


@draws(60)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    topology=st.sampled_from([Topology(1, 1), Topology(2, 2), Topology(2, 3), Topology(2, 4)]),
)
def test_candidates_keep_a_sequence_in_one_group_and_its_tiles_in_its_rings(
    data, lengths, topology
):
    solver = data.draw(st.sampled_from(static_candidates(lengths, SHAPE, topology)))
    graph, placement = place(solver, lengths, topology)
    check_placement(graph, placement)
    assert placement.static
    assert placement.solver == solver.name
    degree = (solver.degrees and solver.degrees.ranks) or topology.num_ranks
    group = placement.block_rank // degree
    for sequence in range(len(lengths)):
        assert len(set(group[graph.blocks.sequence == sequence].tolist())) == 1
    traffic, tiles = placement.traffic, graph.tiles["default"]
    if traffic is not None:
        members = [set(ring) for ring in traffic.rings]
        rings = traffic.ring[tiles.k_block, tiles.head_group].tolist()
        ranks = placement.tile_rank["default"].tolist()
        assert all(rank in members[ring] for rank, ring in zip(ranks, rings, strict=True))
        assert (traffic.home[tiles.q_block, tiles.head_group] == ranks).all()


@pytest.mark.parametrize("method", ["ring", "zigzag", "all_gather", "loongtrain"])
def test_every_rank_owns_the_same_share_of_every_sequence(method):
    graph, placement = place(with_degree(method), [1600, 320], Topology(2, 4))
    for sequence, length in enumerate(graph.batch.lengths):
        own = graph.blocks.sequence == sequence
        held = np.bincount(placement.block_rank[own], graph.blocks.tokens[own])
        assert held.tolist() == [length / 8] * 8


def test_zigzag_balances_causal_work_and_contiguous_chunks_do_not():
    topology = Topology(2, 4)
    assert max_over_mean(*place(with_degree("zigzag"), [4096, 800], topology))[0] < 1.01
    assert max_over_mean(*place(with_degree("ring"), [4096, 800], topology))[0] > 1.8


def test_grids_put_heads_or_contexts_on_neighbouring_ranks():
    head_first = Grid(groups=1, contexts=3, heads=2)
    context_first = Grid(groups=1, contexts=3, heads=2, context_first=True)
    assert head_first.ranks[0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert context_first.ranks[0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert head_first.rings == ((0, 2, 4), (1, 3, 5))
    assert context_first.rings == ((0, 1, 2), (3, 4, 5))
    two = Grid(groups=2, contexts=2, heads=2)
    assert two.rings == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize(("method", "stride"), [("transformer_engine", 1), ("loongtrain", 4)])
def test_heads_of_a_block_are_computed_on_the_ranks_beside_its_owner(method, stride):
    """8 ranks, 2 heads × 4 contexts: ranks of one context are `stride` apart."""
    graph, placement = place(with_degree(method, heads=2), [1600], Topology(2, 4))
    tiles, owner = graph.tiles["default"], placement.block_rank
    first = owner // 2 * 2 if stride == 1 else owner % 4
    expected = first[tiles.q_block] + stride * tiles.head_group
    assert (placement.tile_rank["default"] == expected).all()
    assert max_over_mean(graph, placement) == (1.0, 1.0)


def test_ulysses_computes_every_head_group_on_its_own_rank():
    graph, placement = place(with_degree("ulysses"), [400, 200], Topology(1, 4))
    tiles = graph.tiles["default"]
    assert len(graph.head_groups) == 4
    assert (placement.tile_rank["default"] == tiles.head_group).all()
    assert max_over_mean(graph, placement) == (1.0, 1.0)


def test_methods_that_split_heads_take_as_many_as_model_and_ranks_allow():
    def name(method: str, kv_heads: int, topology: Topology) -> str:
        shape = AttentionShape(2 * kv_heads, kv_heads, 8)
        return SOLVERS[method].fitted(shape, topology).name

    assert name("ulysses", 8, Topology(2, 2)) == "ulysses/cp4"
    assert name("ulysses", 2, Topology(2, 2)) == "ulysses/cp2"
    assert name("ulysses", 3, Topology(2, 2)) == "ulysses/cp1"
    assert name("loongtrain", 4, Topology(4, 2)) == "loongtrain/h4"
    assert name("transformer_engine", 4, Topology(4, 2)) == "transformer_engine/h2"
    unknown = AttentionShape.assumed()
    assert SOLVERS["ulysses"].fitted(unknown, Topology(2, 2)).name == "ulysses/cp1"


def test_equal_sequences_are_dealt_equally_and_a_long_one_stays_alone():
    graph, _ = place(with_degree("zigzag"), [100] * 12, Topology(1, 4))
    assert np.bincount(deal_sequences(graph, 4)).tolist() == [3, 3, 3, 3]
    graph, _ = place(with_degree("zigzag"), [900, 100, 100, 100], Topology(1, 2))
    group = deal_sequences(graph, 2).tolist()
    assert group[1:] == [1 - group[0]] * 3


@draws(40)
@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20), groups=st.integers(1, 6))
def test_no_group_exceeds_the_mean_by_more_than_its_last_sequence(lengths, groups):
    graph, _ = place(with_degree("zigzag"), lengths, Topology(1, groups))
    load, group = sequence_load(graph), deal_sequences(graph, groups)
    loads = np.stack([np.bincount(group, share, groups) for share in load.T])
    assert loads.max() <= 2 / groups + load.max() + 1e-9  # two limits, dealt as one


def test_magi_balances_compute_and_nearly_tokens():
    lengths, ranks = [20000, 3000, 5000, 1200, 800, 2768], 8
    graph, placement = place(with_degree("magi"), lengths, Topology(1, ranks))
    compute, tokens = max_over_mean(graph, placement)
    assert compute < 1.05
    assert tokens < 1.15


@pytest.mark.parametrize("lengths", [[32768], [8192] * 4])
def test_magi_gives_every_rank_equally_many_chunks(lengths):
    """Eight each; these lengths are whole chunks, and a chunk is a block."""
    ranks = 8
    _, placement = place(with_degree("magi"), lengths, Topology(1, ranks))
    assert np.bincount(placement.block_rank).tolist() == [8] * ranks


@draws(60)
@given(work=st.lists(st.integers(0, 50), min_size=1, max_size=40), ranks=st.integers(1, 6))
def test_heap_and_snake_deal_equal_numbers(work, ranks):
    chunks = np.asarray(work * ranks, np.int64)
    for deal in (heap_ranks, snake_ranks):
        assert np.bincount(deal(chunks, ranks)).tolist() == [len(work)] * ranks


def test_heap_and_snake_by_example():
    work = np.array([1, 9, 6, 7])
    assert heap_ranks(work, 2).tolist() == [0, 0, 1, 1]
    assert snake_ranks(work, 2).tolist() == [0, 0, 1, 1]
    assert snake_ranks(np.arange(6)[::-1], 2).tolist() == [0, 1, 1, 0, 0, 1]
    assert heap_ranks(np.array([10, 1, 1, 1]), 2).tolist() == [0, 1, 1, 0]


def test_ptrr_balances_the_rows_of_a_causal_mask():
    compute, tokens = max_over_mean(*place(with_degree("ptrr"), [32768], Topology(1, 8)))
    assert compute < 1.01
    assert tokens == 1.0


@draws(60)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=10),
    ranks=st.integers(1, 9),
    budget=st.none() | st.integers(20, 500),
)
def test_hybrid_groups_are_the_smallest_powers_of_two_that_fit(lengths, ranks, budget):
    most = 1 << (ranks.bit_length() - 1)
    share = -(-sum(lengths) // most) if budget is None else budget
    if max(lengths) > share * most:
        with pytest.raises(ValueError, match=f"groups have up to {most} of the {ranks} ranks"):
            group_sizes(lengths, ranks, budget)
        return
    for size, length in zip(group_sizes(lengths, ranks, budget).tolist(), lengths, strict=True):
        assert size & (size - 1) == 0
        assert size <= most
        assert length <= size * share
        assert size == 1 or length > size // 2 * share


def test_hybrid_documents_use_aligned_groups_and_stay_whole_where_they_fit():
    graph, placement = place(
        find_solver("megatron_hybrid/tokens450"), [900, 400, 200, 200], Topology(1, 4)
    )
    ranks = [
        sorted(set(placement.block_rank[graph.blocks.sequence == s].tolist())) for s in range(4)
    ]
    assert ranks == [[0, 1], [2], [3], [3]]
    assert placement.traffic is not None
    assert set(placement.traffic.rings) == {(0, 1), (2,), (3,)}


def test_candidates_are_all_splits_and_head_degrees():
    shape, topology = AttentionShape(4, 2, 8), Topology(2, 2)
    names = [s.name for s in static_candidates([64, 8], shape, topology)]
    assert len(names) == len(set(names))
    assert [n for n in names if n.startswith("zigzag")] == [
        "zigzag/cp1",
        "zigzag/cp2",
        "zigzag/cp4",
    ]
    assert [n for n in names if n.startswith("ulysses")] == ["ulysses/cp2"]
    assert [n for n in names if n.startswith("loongtrain")] == ["loongtrain/cp4h2"]
    assert [n for n in names if "by_node" in n] == ["all_gather_by_node/cp4"]
    assert {n.partition("/")[0] for n in names} == {s.name for s in STATIC_SOLVERS}
    chosen = static_candidates([64, 8], shape, topology, ["zigzag", "loongtrain"])
    assert [s.name for s in chosen][-1] == "loongtrain/cp4h2"
    assert len(chosen) == 4
    assert not [
        s for s in static_candidates([8], AttentionShape.assumed(), topology) if s.head_groups
    ]


def test_solvers_are_found_by_their_names():
    for solver in static_candidates([64, 8], AttentionShape(8, 8, 8), Topology(2, 4)):
        assert find_solver(solver.name).name == solver.name
        assert find_solver(solver.name).head_groups == solver.head_groups
    for name, solver in SOLVERS.items():
        assert find_solver(name) is solver
    assert find_solver("megatron_hybrid/tokens64").name == "megatron_hybrid/tokens64"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best", "solver is 'best'; choose one of"),
        ("zigzag/8", "solver is 'zigzag/8'; write degrees as zigzag/cp8"),
        ("zigzag/cp8h2", "zigzag does not split heads; got heads=2"),
        ("ulysses/cp4h2", "got degree=4 and heads=2, which must be equal"),
        ("megatron_hybrid/cp2", "write it as megatron_hybrid/tokens4096"),
        ("megatron_hybrid/tokens0", "budget is 0 tokens; at least 1"),
        ("random/cp2", "static method is 'random'; choose one of"),
    ],
)
def test_names_that_mean_nothing_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_solver(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zigzag/cp3", "degree of 3 does not divide 8 ranks; allowed are 1, 2, 4, 8"),
        ("zigzag/cp0", "degree of 0 does not divide 8 ranks"),
        ("ulysses/cp8", "needs 8 groups of equally many kv heads; the model has 4"),
        ("loongtrain/cp2h4", "4 head groups do not divide the context-parallel degree 2"),
        ("transformer_engine/h3", "needs 3 groups of equally many kv heads"),
    ],
)
def test_degrees_that_ranks_or_heads_do_not_allow_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_solver(name).fitted(SHAPE, Topology(2, 4))


def test_head_degrees_need_a_known_model_and_a_graph_with_these_groups():
    solver = with_degree("ulysses", 2)
    with pytest.raises(ValueError, match="splits heads; give the attention shape"):
        solver.fitted(AttentionShape.assumed(), Topology(1, 2))
    graph = build_graph(Batch.of([masks.causal(8)]), SHAPE, [4], 4)
    with pytest.raises(ValueError, match="needs the heads in 2 groups; the graph has 4"):
        solver.place(graph, Topology(1, 2), Limits(), 0)


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
