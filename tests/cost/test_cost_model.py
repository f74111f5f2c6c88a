"""What tiles, calls and copies cost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, masks
from dyncp.blocks import Direction, build_graph
from dyncp.cost import PROFILES, CostModel, find_profile
from dyncp.topology import PRESETS
from kernels_only import KERNELS_ONLY

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
COST = CostModel(KERNELS_ONLY, AttentionShape(32, 8, 128))


def area(pairs: int, rows: int, keys: int) -> float:
    return float(COST.kernel_area(np.array([pairs]), np.array([rows]), np.array([keys]))[0])


def touched_area(mask: masks.Mask, side: int) -> int:
    """Pairs in kernel tiles that hold an allowed pair, counted one by one."""
    n = -(-mask.length // side) * side
    allowed = np.zeros((n, n), bool)
    for row, ranges in enumerate(mask.ranges):
        for start, end in ranges:
            allowed[row, start:end] = True
    tiles = allowed.reshape(n // side, side, n // side, side)
    return int(tiles.any(axis=(1, 3)).sum()) * side * side


@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(0, 1))
def test_area_lies_between_pairs_and_whole_kernel_tiles(rows: int, keys: int, share: float) -> None:
    pairs = max(1, round(rows * keys * share))
    whole = rows * -(-keys // 128) * 128
    assert pairs * (1 - 1e-9) <= area(pairs, rows, keys) <= whole * (1 + 1e-9)
    assert area(pairs, rows, keys) <= area(min(pairs + 1, rows * keys), rows, keys)


def test_a_full_tile_on_kernel_tile_borders_has_no_waste() -> None:
    assert area(512 * 256, 512, 256) == 512 * 256


@pytest.mark.parametrize(
    ("mask", "tolerance"),
    [
        (masks.causal(2048), 0.01),
        (masks.causal(600), 0.15),
        (masks.sliding_window(2048, window=1024), 0.1),
        (masks.shared_question(2048), 0.2),
    ],
    ids=["causal", "short causal", "window", "shared question"],
)
def test_area_is_close_to_that_of_the_kernel_tiles_touched(
    mask: masks.Mask, tolerance: float
) -> None:
    pairs = int(np.diff(mask.ranges, axis=2).sum())
    estimate = area(pairs, mask.length, mask.length)
    assert estimate == pytest.approx(touched_area(mask, 128), rel=tolerance)


def test_a_large_causal_tile_runs_at_the_rate_of_the_profile() -> None:
    n = 32768
    pairs = np.array([n * (n + 1) // 2])
    for direction, flops, rate in ((FORWARD, 4, 233e12), (BACKWARD, 10, 203e12)):
        seconds = COST.tile_seconds(pairs, np.array([n]), np.array([n]), 32, direction)[0]
        assert flops * pairs[0] * 128 * 32 / seconds == pytest.approx(rate, rel=0.01)


def edge(pairs: int, rows: int, keys: int) -> float:
    return float(COST.edge_area(np.array([pairs]), np.array([rows]), np.array([keys]))[0])


def test_edges_are_in_one_kernel_tile_per_row_and_at_ragged_ends() -> None:
    kernel_tile = 128 * 128
    assert edge(1024 * 1024, 1024, 1024) == 0
    assert edge(1024 * 1025 // 2, 1024, 1024) == 8 * kernel_tile  # causal
    assert edge(1024 * 1000, 1024, 1000) == 8 * kernel_tile  # its last keys
    assert edge(1000 * 1024, 1000, 1024) == pytest.approx(8 * kernel_tile)  # its last rows
    assert edge(100 * 100, 100, 100) == area(100 * 100, 100, 100)


@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(0, 1))
def test_edges_are_part_of_the_area(rows: int, keys: int, share: float) -> None:
    pairs = max(1, round(rows * keys * share))
    assert 0 <= edge(pairs, rows, keys) <= area(pairs, rows, keys)


@pytest.mark.parametrize("direction", Direction)
def test_kernel_tiles_with_edges_take_as_much_longer_as_the_profile_says(
    direction: Direction,
) -> None:
    profile = replace(COST.profile, edge_forward=3.0, edge_backward=5.0)
    cost = CostModel(profile, COST.shape)
    n = np.array([1024])
    plain, full = (COST.tile_seconds(p, n, n, 32, direction)[0] for p in (n * (n + 1) // 2, n * n))
    causal = cost.tile_seconds(n * (n + 1) // 2, n, n, 32, direction)[0]
    assert causal - plain == pytest.approx(full / 64 * 8 * (cost.edge_factor(direction) - 1))
    assert cost.tile_seconds(n * n, n, n, 32, direction)[0] == full
    graph = build_graph(Batch.of([masks.causal(1024)]), COST.shape, [1024])
    assert cost.graph_tile_seconds(graph, "default", direction) == pytest.approx([causal])


def test_seconds_are_proportional_to_heads() -> None:
    one, four = (
        COST.tile_seconds(np.array([99]), np.array([10]), np.array([10]), h, FORWARD)[0]
        for h in (1, 4)
    )
    assert four == pytest.approx(4 * one)


def test_head_groups_share_the_seconds_of_a_graph() -> None:
    batch = Batch.of([masks.causal(500), masks.causal(900)])
    one, four = (
        COST.graph_tile_seconds(build_graph(batch, COST.shape, [128, 128], g), "default", FORWARD)
        for g in (1, 4)
    )
    assert four.sum() == pytest.approx(one.sum())
    assert len(four) == 4 * len(one)


def test_every_topology_preset_has_a_profile() -> None:
    assert list(PROFILES) == list(PRESETS)
    for name, profile in PROFILES.items():
        assert profile.topology(2).num_ranks == 2 * PRESETS[name].ranks_per_node
        assert profile.topology(1, 2).intra == PRESETS[name].intra
    with pytest.raises(ValueError, match="'h150'; choose one of p4de, h100, h200"):
        find_profile("h150")
