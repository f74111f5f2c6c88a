"""Tile lists and ranges allow exactly the pairs of a call."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import draw_call

from dyncp import AttentionShape, Batch, PlannerConfig, Topology, masks, plan_batch
from dyncp.executor.kernel_calls import RankProgram
from dyncp.kernels.tile_lists import (
    FULL,
    HALF,
    NONE,
    PARTIAL,
    SIDE,
    KernelTileMap,
    classify_tiles,
    list_tiles_of,
    map_kernel_tiles,
    transpose_ranges,
)
from dyncp.plan import Direction
from sizes import draws
from strategies import masks_of

SHAPE = AttentionShape(2, 1, 16)


def pairs_in(ranges, num_others):
    """bool[rows, others]: the pairs in ranges [R, 2, rows]."""
    others = np.arange(num_others)
    inside = np.zeros((ranges.shape[2], num_others), np.bool_)
    for start, end in ranges:
        inside |= (others >= start[:, None]) & (others < end[:, None])
    return inside


def spread(state, side=SIDE):
    """The state of the tile of every pair."""
    return state.repeat(side, 0).repeat(side, 1)


def pairs_of(tiles, state, side, num_rows, num_keys):
    """bool[rows, keys] that a kernel computes from ranges and the states of its kernel tiles."""
    inside = pairs_in(tiles.ranges[:, :, :num_rows], num_keys)
    state = spread(state, side)[:num_rows, :num_keys]
    return (state == FULL) | ((state == PARTIAL) & inside)


def calls_of(batch, topology, config):
    """The forward kernel calls of all ranks."""
    for part in plan_batch(batch, topology, SHAPE, config).parts:
        program = RankProgram(part, part.masks["default"], Direction.FORWARD)
        for calls in program.kernel_calls().values():
            yield from calls


@st.composite
def planned_calls(draw):
    """The calls of a random plan: a few sequences with random masks, up to 4 ranges per token."""
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=3))
    batch = Batch.of([draw(masks_of(length)) for length in lengths])
    config = PlannerConfig(
        solver="random",
        block_size=draw(st.sampled_from([50, 128, 300])),
        divisions=draw(st.integers(2, 3)),
        seed=draw(st.integers(0, 999)),
    )
    return list(calls_of(batch, Topology(1, draw(st.integers(1, 3))), config))


def assert_transposed(tiles):
    transposed = transpose_ranges(tiles)
    num_rows, num_keys = (count * SIDE for count in tiles.state.shape)
    assert transposed.shape[1:] == (2, num_keys)
    partial = spread(tiles.state) == PARTIAL
    by_row, by_key = pairs_in(tiles.ranges, num_keys), pairs_in(transposed, num_rows)
    assert np.array_equal(by_key.T & partial, by_row & partial)


@pytest.mark.parametrize("seed", range(300))
def test_full_tiles_and_ranges_allow_exactly_the_pairs_of_the_call(seed):
    case = draw_call(seed, num_ranges=1 + seed % 2, largest=700 if seed % 3 else 100)
    tiles = map_kernel_tiles(case.call)
    for state, side in ((tiles.state, SIDE), (classify_tiles(case.call, HALF), HALF)):
        assert np.array_equal(pairs_of(tiles, state, side, *case.allowed.shape), case.allowed)


@pytest.mark.parametrize("seed", range(20))
def test_lists_hold_every_tile_once_and_most_work_comes_first(seed):
    state = np.random.default_rng(seed).choice(3, (9, 13), p=[0.3, 0.3, 0.4]).astype(np.uint8)
    rows = np.arange(9 * SIDE)
    touched = (rows // SIDE != 4) & (rows % SIDE == 3)
    lists = list_tiles_of(state, touched)
    listed = np.zeros_like(state)
    for tile, num_runs, num_partial, *others in lists.entries.tolist():
        listed[tile, others[2 * lists.most_runs :][:num_partial]] += PARTIAL
        for first, end in np.reshape(others[: 2 * num_runs], (-1, 2)):
            listed[tile, first:end] += FULL
    order = lists.entries[:, 0]
    assert np.array_equal(listed[order], state[order])
    work = (state > 0).sum(1)[order]
    assert (np.diff(work) <= 0).all()
    assert sorted(order) == [0, 1, 2, 3, 5, 6, 7, 8], "tiles with touched rows, and no others"


@pytest.mark.parametrize("seed", range(60))
def test_transposed_ranges_allow_the_same_pairs_of_partial_tiles(seed):
    case = draw_call(seed, num_ranges=1 + seed % 2, largest=700 if seed % 3 else 100)
    assert_transposed(map_kernel_tiles(case.call))


@draws(30)
@given(planned_calls())
def test_transposed_ranges_of_plans_allow_the_same_pairs_of_partial_tiles(calls):
    for call in calls:
        assert_transposed(map_kernel_tiles(call))


def test_partial_tiles_with_a_full_one_between_give_one_range():
    """A window of 256 keys: key 5 is attended by rows 5 to 260, of three query tiles."""
    row, key = np.arange(4 * SIDE), np.arange(1, SIDE)
    ranges = np.stack([np.maximum(row - 255, 0), np.minimum(row + 1, SIDE)])[None]
    ranges[:, :, SIDE : 2 * SIDE] = 7  # a full tile: its ranges do not matter
    ranges[:, 0, 3 * SIDE :] = 0  # a tile that is not listed: nor do these
    state = np.array([[PARTIAL], [FULL], [PARTIAL], [NONE]], np.uint8)
    transposed = transpose_ranges(KernelTileMap(state, ranges.astype(np.int32)))
    assert len(transposed) == 1
    assert np.array_equal(transposed[0, :, 1:], [key, key + 256])
    assert transposed[0, :, 0].tolist() == [0, SIDE]  # the third tile has nothing for key 0


def test_a_partial_tile_that_does_not_attend_a_key_splits_its_ranges():
    row = np.arange(3 * SIDE)
    ranges = np.stack([np.zeros_like(row), np.full_like(row, 10)])[None].astype(np.int32)
    ranges[:, 0, SIDE : 2 * SIDE] = 5
    state = np.full((3, 1), PARTIAL, np.uint8)
    transposed = transpose_ranges(KernelTileMap(state, ranges))
    assert transposed[:, :, 4].tolist() == [[0, SIDE], [2 * SIDE, 3 * SIDE]]
    assert transposed[:, :, 5].tolist() == [[0, 3 * SIDE], [0, 0]]
    assert transposed[:, :, 10].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    "mask", [masks.causal, masks.lambda_shaped(sinks=20, window=300)], ids=["causal", "lambda"]
)
def test_keys_of_one_rank_have_one_range_of_query_rows(mask):
    batch = Batch.of([mask(n) for n in (1500, 129, 1, 700)])
    [call] = calls_of(batch, Topology(1, 1), PlannerConfig("owner_computes"))
    assert len(transpose_ranges(map_kernel_tiles(call))) == 1
