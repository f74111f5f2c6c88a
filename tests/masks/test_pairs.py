"""Pair counts against sums over the dense mask."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from dyncp.masks import count_batch_tile_pairs, count_tile_pairs, find_runs, list_tiles
from strategies import masks_of


def dense_counts(mask, block_size):
    dense = mask.dense()
    cuts = range(0, mask.length, block_size)
    return [[int(dense[i : i + block_size, j : j + block_size].sum()) for j in cuts] for i in cuts]


def test_the_example_of_the_docstring_is_right():
    counts = count_tile_pairs(masks.causal(5), 2)
    assert counts.tolist() == [[3, 0, 0], [4, 3, 0], [2, 2, 1]]
    assert counts.dtype == np.int64


def test_tiles_are_listed_across_all_sequences():
    runs = find_runs([masks.causal(5).ranges, masks.full(2).ranges])
    q_block, k_block, pairs = list_tiles(runs, [2, 1])
    assert q_block.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert k_block.tolist() == [0, 0, 1, 0, 1, 2, 3, 4, 3, 4]
    assert pairs.tolist() == [3, 4, 3, 2, 2, 1, 1, 1, 1, 1]


@given(st.data(), st.integers(1, 40), st.integers(1, 45))
def test_tile_pairs_equal_sums_over_the_dense_mask(data, length, block_size):
    mask = data.draw(masks_of(length))
    assert count_tile_pairs(mask, block_size).tolist() == dense_counts(mask, block_size)
    assert mask.num_pairs == mask.dense().sum()


@given(st.data(), st.lists(st.tuples(st.integers(1, 25), st.integers(1, 30)), max_size=6))
def test_a_batch_counts_like_its_sequences(data, sequences):
    batch = [data.draw(masks_of(length)) for length, _ in sequences]
    sizes = [size for _, size in sequences]
    counts = count_batch_tile_pairs(batch, sizes)
    assert [c.tolist() for c in counts] == [
        dense_counts(mask, size) for mask, size in zip(batch, sizes, strict=True)
    ]


@given(st.data(), st.lists(st.tuples(st.integers(1, 25), st.integers(1, 30)), min_size=1))
def test_tiles_of_joined_sequences_are_those_of_each(data, sequences):
    drawn = [data.draw(masks_of(length)) for length, _ in sequences]
    sizes = [size for _, size in sequences]
    q_block, k_block, pairs = list_tiles(find_runs([m.ranges for m in drawn]), sizes)
    counts = [count_tile_pairs(mask, size) for mask, size in zip(drawn, sizes, strict=True)]
    blocks = sum(map(len, counts))
    matrix, first = np.zeros((blocks, blocks), np.int64), 0
    for own in counts:
        matrix[first : first + len(own), first : first + len(own)] = own
        first += len(own)
    found = np.zeros_like(matrix)
    found[q_block, k_block] = pairs
    np.testing.assert_array_equal(found, matrix)


def test_runs_keep_the_order_of_sequences():
    lengths = [50_000, 3, 20_000, 70_000, 7, 1]
    runs = find_runs([masks.causal(length).ranges for length in lengths])
    assert runs.lengths.tolist() == lengths
    assert runs.start.tolist() == [0] * 6
    assert runs.base.tolist() == [[[0, 1]]] * 6


def test_a_long_batch_keeps_its_order():
    lengths = [50_000, 3, 20_000, 20_000, 7, 1]
    batch = [masks.causal(length) for length in lengths]
    counts = count_batch_tile_pairs(batch, [4096] * 6)
    for mask, count in zip(batch, counts, strict=True):
        np.testing.assert_array_equal(count, count_tile_pairs(mask, 4096))
        assert count.sum() == mask.num_pairs


def test_long_sequences_do_not_overflow():
    length = 1 << 20
    counts = count_tile_pairs(masks.full(length), length // 2)
    assert counts.tolist() == [[length**2 // 4] * 2] * 2
    assert masks.full(length).num_pairs == length**2


def test_bad_block_sizes_are_refused():
    with pytest.raises(ValueError, match="block_size is 0; at least 1"):
        count_batch_tile_pairs([masks.causal(3)] * 2, [1, 0])
    with pytest.raises(ValueError, match="2 masks need as many block sizes; got 1"):
        count_batch_tile_pairs([masks.causal(3)] * 2, [1])
