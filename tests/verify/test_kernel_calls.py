"""Kernel calls that the executor derives from plans keep invariant 6."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_plans import planned_batches, rich_batch, rich_plan

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology, masks, plan_batch
from dyncp.cli.verify import gpu_kernel_tiles, kernel_calls_of
from dyncp.kernels import KernelCall, list_kernel_tiles
from dyncp.kernels.tile_lists import SIDE
from dyncp.plan import MaskPlan, OwnedBlocks
from dyncp.verify import ListedKernelTiles, Violation, check_kernel_call

LISTED = ("q_tile", "k_tile", "full")
TILE_SIZES = st.sampled_from([4, 8, 16, 128])


def listed_tiles(call: KernelCall, rows: int, columns: int) -> ListedKernelTiles:
    """What `reference` works from."""
    tiles = list_kernel_tiles(call, rows, columns)
    partial, keys = np.zeros(len(tiles.q_tile), np.bool_), call.k_coordinates
    listed = (tiles.rows, tiles.columns, tiles.q_tile, tiles.k_tile, partial, tiles.ranges)
    return ListedKernelTiles(*listed, keys, call.q_coordinates, keys)


def check(
    batch: Batch, name: str, blocks: OwnedBlocks, mask: MaskPlan, own: np.ndarray, listed: object
) -> list[Violation]:
    q_block, k_block = mask.tiles.q_block[own], mask.tiles.k_block[own]
    return check_kernel_call(batch, name, blocks, q_block, k_block, listed)


@settings(max_examples=60, deadline=None)
@given(planned_batches(), TILE_SIZES, TILE_SIZES)
def test_listed_kernel_tiles_allow_exactly_the_pairs_of_the_calls_tiles(
    case: tuple[Batch, Plan], rows: int, columns: int
) -> None:
    batch, plan = case
    for part in plan.parts:
        for name, mask in part.masks.items():
            for call, own in kernel_calls_of(part, mask):
                listed = listed_tiles(call, rows, columns)
                assert check(batch, name, part.blocks, mask, own, listed) == []


@settings(max_examples=60, deadline=None)
@given(planned_batches())
def test_the_tile_lists_of_gpu_kernels_allow_exactly_the_pairs_of_the_calls_tiles(
    case: tuple[Batch, Plan],
) -> None:
    batch, plan = case
    for part in plan.parts:
        for name, mask in part.masks.items():
            for call, own in kernel_calls_of(part, mask):
                for listed in gpu_kernel_tiles(call):
                    assert check(batch, name, part.blocks, mask, own, listed) == []


def long_plan() -> tuple[Batch, Plan]:
    """Long enough for full tiles of 128 rows."""
    batch = Batch.of([masks.lambda_shaped(900, sinks=200, window=500), masks.causal(300)])
    config = PlannerConfig("bisection", block_size=150, head_groups=1)
    return batch, plan_batch(batch, Topology(1, 2), AttentionShape(2, 1, 16), config)


def test_full_tiles_of_gpu_kernels_hold_allowed_pairs_only() -> None:
    batch, plan = long_plan()
    num_full = 0
    for part in plan.parts:
        mask = part.masks["default"]
        for call, own in kernel_calls_of(part, mask):
            for listed in gpu_kernel_tiles(call):
                num_full += int(listed.full.sum())
                assert check(batch, "default", part.blocks, mask, own, listed) == []
                wrong = replace(listed, full=np.ones_like(listed.full))
                assert check(batch, "default", part.blocks, mask, own, wrong)
    assert num_full > 10


def test_key_rows_that_hold_nothing_are_found() -> None:
    batch, plan = long_plan()
    part = plan.parts[0]
    mask = part.masks["default"]
    call, own = next(kernel_calls_of(part, mask))
    listed = next(gpu_kernel_tiles(call))
    keys = listed.k_coordinates.copy()
    keys[int(listed.ranges[listed.q_tile[0] * SIDE, 0, 0])] = -1
    gaps = replace(listed, k_coordinates=keys)
    violations = check(batch, "default", part.blocks, mask, own, gaps)
    assert any("rows that hold no key" in violation.sentence for violation in violations)


def sample_calls() -> Iterator[tuple[OwnedBlocks, MaskPlan, KernelCall, np.ndarray]]:
    for part in rich_plan().parts:
        mask = part.masks["default"]
        for call, own in kernel_calls_of(part, mask):
            yield part.blocks, mask, call, own


def test_ranges_that_are_not_cut_are_found_where_kernel_tiles_mix_blocks() -> None:
    found = 0
    for blocks, mask, call, own in sample_calls():
        uncut = replace(listed_tiles(call, 16, 16), ranges=call.ranges)
        violations = check(rich_batch(), "default", blocks, mask, own, uncut)
        assert {v.invariant for v in violations} <= {6}
        found += any("belongs to 0 tiles" in v.sentence for v in violations)
    assert found > 3


@pytest.mark.parametrize("size", [4, 16])
def test_a_missing_kernel_tile_is_found(size: int) -> None:
    found = 0
    for blocks, mask, call, own in sample_calls():
        listed = listed_tiles(call, size, size)
        short = replace(listed, **{f: getattr(listed, f)[1:] for f in LISTED})
        violations = check(rich_batch(), "default", blocks, mask, own, short)
        found += any("is computed 0 times" in v.sentence for v in violations)
    assert found > 3


def test_a_kernel_tile_listed_twice_is_found() -> None:
    blocks, mask, call, own = next(sample_calls())
    listed = listed_tiles(call, 16, 16)
    columns = {f: getattr(listed, f) for f in LISTED}
    twice = replace(listed, **{f: np.append(column, column[0]) for f, column in columns.items()})
    violations = check(rich_batch(), "default", blocks, mask, own, twice)
    assert any("is computed 2 times" in v.sentence for v in violations)


def test_coordinates_of_another_block_are_found() -> None:
    blocks, mask, call, own = next(sample_calls())
    shifted = np.where(call.k_coordinates >= 0, (call.k_coordinates + 1) % 51, -1)
    listed = replace(listed_tiles(call, 16, 16), k_coordinates=shifted)
    assert check(rich_batch(), "default", blocks, mask, own, listed)


def test_kernel_tiles_that_do_not_exist_are_reported_not_raised() -> None:
    blocks, mask, call, own = next(sample_calls())
    listed = listed_tiles(call, 16, 16)
    for broken in (
        replace(listed, q_tile=listed.q_tile + 99),
        replace(listed, k_tile=listed.k_tile[1:]),
        replace(listed, q_coordinates=listed.q_coordinates + 99),
    ):
        violations = check(rich_batch(), "default", blocks, mask, own, broken)
        assert {v.invariant for v in violations} == {6}
