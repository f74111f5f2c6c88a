"""Tile lists say exactly which pairs a call allows."""

import numpy as np
import pytest
from kernel_cases import draw_call

from dyncp.kernels.tile_lists import FULL, HALF, PARTIAL, SIDE, list_tiles_of, map_kernel_tiles


def pairs_of(tiles, state, num_rows, num_keys):
    """bool[rows, keys] that a kernel computes from a map of kernel tiles."""
    side = SIDE if state is tiles.state else HALF
    state = state.repeat(side, 0).repeat(side, 1)[:num_rows, :num_keys]
    keys = np.arange(num_keys)
    inside = np.zeros((num_rows, num_keys), np.bool_)
    for start, end in tiles.ranges[:, :, :num_rows]:
        inside |= (keys >= start[:, None]) & (keys < end[:, None])
    return (state == FULL) | ((state == PARTIAL) & inside)


@pytest.mark.parametrize("seed", range(300))
def test_full_tiles_and_ranges_allow_exactly_the_pairs_of_the_call(seed):
    case = draw_call(seed, num_ranges=1 + seed % 2, largest=700 if seed % 3 else 100)
    tiles = map_kernel_tiles(case.call, halves=True)
    for state in (tiles.state, tiles.halves):
        assert np.array_equal(pairs_of(tiles, state, *case.allowed.shape), case.allowed)


@pytest.mark.parametrize("seed", range(20))
def test_lists_hold_every_tile_once_and_most_work_comes_first(seed):
    state = np.random.default_rng(seed).choice(3, (9, 13), p=[0.3, 0.3, 0.4]).astype(np.uint8)
    rows = np.arange(9 * SIDE)
    touched = (rows // SIDE != 4) & (rows % SIDE == 3)
    lists = list_tiles_of(state, touched)
    listed = np.zeros_like(state)
    for i in range(len(state)):
        listed[i, lists.partial[i, : lists.partial_count[i]]] += PARTIAL
        for first, end in lists.runs[i, : lists.run_count[i]]:
            listed[i, first:end] += FULL
    assert np.array_equal(listed, state)
    work = (state > 0).sum(1)[lists.order]
    assert (np.diff(work) <= 0).all()
    assert set(lists.order) == set(range(9)) - {4}, "tiles with touched rows, and no others"
