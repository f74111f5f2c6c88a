"""Placement solvers, by their properties."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import BlockGraph, Direction, build_graph
from dyncp.placement import (
    SOLVERS,
    Limits,
    Placement,
    check_placement,
    measure_balance,
    minimal_bytes,
)
from sizes import draws
from strategies import ALWAYS_THERE

SHAPE = AttentionShape(8, 2, 16)


def place(solver: str, lengths: list[int], num_ranks: int, seed: int = 0, mask=masks.causal):
    batch = Batch.of([mask(n) for n in lengths])
    sizes = SOLVERS[solver].block_sizes(lengths, num_ranks)
    graph = build_graph(batch, SHAPE, sizes.tolist())
    return graph, SOLVERS[solver].place(graph, Topology(1, num_ranks), Limits(), seed)


def max_over_mean(graph: BlockGraph, placement: Placement) -> tuple[float, float]:
    balance = measure_balance(graph, placement, Limits())
    return balance.compute_max_over_mean, balance.tokens_max_over_mean


@draws(60)
@given(
    solver=st.sampled_from(ALWAYS_THERE),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    num_ranks=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_solvers_give_total_maps_that_depend_on_their_arguments_only(
    solver, lengths, num_ranks, seed
):
    graph, placement = place(solver, lengths, num_ranks, seed)
    check_placement(graph, placement)
    again = place(solver, lengths, num_ranks, seed)[1]
    assert (placement.block_rank == again.block_rank).all()
    assert (placement.tile_rank["default"] == again.tile_rank["default"]).all()


def test_zigzag_balances_tokens_and_causal_work_of_every_sequence():
    graph, placement = place("zigzag", [4096, 800], 4)
    compute, tokens = max_over_mean(graph, placement)
    assert compute < 1.01
    assert tokens < 1.01


def test_minimal_bytes_of_zigzag_are_the_keys_that_a_causal_mask_needs():
    length, num_ranks = 4096, 4
    graph, placement = place("zigzag", [length], num_ranks)
    kv_bytes = 2 * 2 * 16 * 2
    chunk = length // (2 * num_ranks)
    owner = [min(c, 2 * num_ranks - 1 - c) for c in range(2 * num_ranks)]
    needed = sum(
        len({owner[q] for q in range(c, 2 * num_ranks)} - {owner[c]}) for c in range(2 * num_ranks)
    )
    forward = minimal_bytes(graph, placement, "default", Direction.FORWARD)
    assert forward == needed * chunk * kv_bytes


def test_uncut_deals_whole_sequences_and_moves_nothing():
    graph, placement = place("uncut", [512] * 8, 4)
    assert minimal_bytes(graph, placement, "default", Direction.BACKWARD) == 0
    assert max_over_mean(graph, placement) == (1.0, 1.0)
    graph, placement = place("uncut", [5000, 1000, 900], 4)
    assert minimal_bytes(graph, placement, "default", Direction.BACKWARD) == 0


def test_random_uses_every_rank_and_its_seed():
    placement = place("random", [1000] * 20, 4, seed=1)[1]
    assert set(placement.block_rank.tolist()) == {0, 1, 2, 3}
    other = place("random", [1000] * 20, 4, seed=2)[1]
    assert (placement.block_rank != other.block_rank).any()


def test_minimal_bytes_count_each_block_once_per_foreign_rank():
    batch = Batch.of([masks.full(4)])
    graph = build_graph(batch, SHAPE, [2])  # blocks 0 and 1, tiles 00 01 10 11
    tile_rank = {"default": np.array([0, 2, 2, 1], np.int32)}
    placement = Placement(3, np.array([0, 1], np.int32), tile_rank, "hand", static=False)
    q, kv = 8 * 16 * 2, 2 * 2 * 16 * 2
    # rank 2 reads Q and KV of both blocks and returns both partial outputs with their statistics
    expected = 2 * (2 * q + 2 * kv + 2 * (q + 8 * 4))
    assert minimal_bytes(graph, placement, "default", Direction.FORWARD) == expected


def test_a_solver_that_leaves_its_ranks_is_caught():
    graph, placement = place("zigzag", [64], 2)
    bad = Placement(1, placement.block_rank, placement.tile_rank, "zigzag", static=True)
    with pytest.raises(ValueError, match="used ranks 0 to 1 in block_rank; allowed are 0 to 0"):
        check_placement(graph, bad)
    short = Placement(2, placement.block_rank[:-1], placement.tile_rank, "zigzag", static=True)
    with pytest.raises(ValueError, match="gave 3 entries in block_rank; the batch has 4"):
        check_placement(graph, short)
    with pytest.raises(ValueError, match="placed no tiles of mask 'default'"):
        check_placement(graph, Placement(2, placement.block_rank, {}, "zigzag", static=True))
