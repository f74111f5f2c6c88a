"""Cutting batches into blocks and tiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, masks
from dyncp.blocks import (
    HeadGroup,
    Payload,
    build_blocks,
    build_graph,
    bytes_per_token,
    choose_block_sizes,
)
from sizes import draws
from strategies import masks_of


@draws(100)
@given(data=st.data(), lengths=st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_tiles_are_the_block_pairs_with_an_allowed_pair_and_know_its_count(data, lengths):
    chosen = [data.draw(masks_of(n)) for n in lengths]
    sizes = [data.draw(st.integers(1, 20)) for _ in lengths]
    graph = build_graph(Batch.of(chosen), AttentionShape(6, 3, 8), sizes, 2)
    expected = {}
    sequence, start, end = graph.blocks.sequence, graph.blocks.start, graph.blocks.end
    for q in range(len(graph.blocks)):
        for k in np.flatnonzero(sequence == sequence[q]).tolist():
            dense = chosen[sequence[q]].dense()
            pairs = int(dense[start[q] : end[q], start[k] : end[k]].sum())
            expected |= {(q, k, g): pairs for g in range(2) if pairs}
    tiles = graph.tiles["default"]
    columns = (tiles.q_block, tiles.k_block, tiles.head_group)
    given_tiles = dict(
        zip(zip(*(c.tolist() for c in columns), strict=True), tiles.pairs.tolist(), strict=True)
    )
    assert given_tiles == expected
    assert len(tiles) == len(expected)


def test_blocks_cover_every_sequence_and_the_last_may_be_shorter():
    blocks = build_blocks([7, 1, 4], [3, 3, 4])
    assert blocks.sequence.tolist() == [0, 0, 0, 1, 2]
    assert blocks.start.tolist() == [0, 3, 6, 0, 0]
    assert blocks.end.tolist() == [3, 6, 7, 1, 4]


def test_short_sequences_stay_whole_and_long_ones_are_cut_by_the_ranks_they_need():
    sizes = choose_block_sizes([6000, 1000, 1000], 4)
    assert sizes.tolist() == [256, 1000, 1000]
    assert choose_block_sizes([5000, 10], 1).tolist() == [5000, 10]
    assert choose_block_sizes([1] * 3, 8).tolist() == [1, 1, 1]


def test_head_groups_share_the_kv_heads():
    assert AttentionShape(10, 5, 8).head_groups(2) == (HeadGroup(0, 3), HeadGroup(3, 2))


def test_payload_bytes_follow_from_heads_and_dtypes():
    shape = AttentionShape(8, 2, 128, "bf16")
    row = bytes_per_token(shape, shape.head_groups(1))[:, 0]
    q, kv, statistics = 8 * 128 * 2, 2 * 2 * 128 * 2, 8 * 4
    assert row[Payload.Q] == q
    assert row[Payload.KV] == kv
    assert row[Payload.OUT] == q + statistics
    assert row[Payload.Q_DOUT] == 2 * (q + statistics)
    assert row[Payload.DQ] == q
    assert row[Payload.DKV] == kv
    wide = AttentionShape(8, 2, 128, "bf16", partial_dtype="fp32")
    assert bytes_per_token(wide, wide.head_groups(1))[Payload.DKV, 0] == 2 * kv
    groups = bytes_per_token(shape, shape.head_groups(2))
    assert (groups.sum(axis=1) == row).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6, 4, 8), "kv_heads=4 does not divide q_heads=6"),
        ((4, 0, 8), "kv_heads is 0"),
        ((4, 2, 8, "fp8"), "dtype is 'fp8'; choose one of fp64, fp32, bf16, fp16"),
    ],
)
def test_attention_shapes_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionShape(*arguments)


def test_batches_are_checked():
    with pytest.raises(ValueError, match="mask 'default' of sequence 1 is for 4 tokens"):
        Batch((3, 5), {"default": (masks.causal(3), masks.causal(4))})
    with pytest.raises(ValueError, match="1 masks for 2 sequences"):
        Batch((3, 5), {"default": (masks.causal(3),)})
    with pytest.raises(ValueError, match="every sequence of a batch needs the same mask names"):
        Batch.of([{"a": masks.causal(3)}, {"b": masks.causal(3)}])
    with pytest.raises(ValueError, match="at least one sequence"):
        Batch.of([])
    with pytest.raises(ValueError, match="one size of at least 1 token per sequence"):
        build_blocks([3, 4], [2])


def test_fingerprints_tell_batches_apart():
    base = Batch.of([masks.causal(5), masks.causal(6)])
    assert base.fingerprint == Batch.of([masks.causal(5), masks.causal(6)]).fingerprint
    others = [
        Batch.of([masks.causal(6), masks.causal(5)]),
        Batch.of([masks.causal(5), masks.full(6)]),
        Batch.of([masks.causal(5), masks.causal(6)], sample_ids=[1, 2]),
        Batch.of([{"x": masks.causal(5)}, {"x": masks.causal(6)}]),
    ]
    assert len({base.fingerprint, *(batch.fingerprint for batch in others)}) == 5


def test_offsets_are_the_coordinates_of_first_tokens():
    batch = Batch.of([masks.causal(5), masks.causal(6)])
    assert batch.offsets.tolist() == [0, 5, 11]
    assert np.sum(batch.lengths) == batch.num_tokens
