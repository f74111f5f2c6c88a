"""Kernel calls that the executor derives from plans keep invariant 6."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_plans import planned_batches, rich_batch, rich_plan

from dyncp import Batch, Plan
from dyncp.executor.kernel_calls import kernel_calls
from dyncp.kernels import KernelCall, list_kernel_tiles
from dyncp.plan import MaskPlan, OwnedBlocks, RankPlan
from dyncp.verify import ListedKernelTiles, Violation, check_kernel_call

TILE_SIZES = st.sampled_from([4, 8, 16, 128])


def calls_of(part: RankPlan, mask: MaskPlan) -> Iterator[tuple[KernelCall, np.ndarray]]:
    """All kernel calls of a mask on a rank, each with the indices of its tiles."""
    for _, program in mask.programs():
        for division in np.unique(program.tile_division).tolist():
            for call in kernel_calls(part, mask, program, division):
                mine = program.tile_division == division
                yield call, np.flatnonzero(mine & (mask.tiles.head_group == call.head_group))


def listed_tiles(call: KernelCall, rows: int, columns: int) -> ListedKernelTiles:
    tiles = list_kernel_tiles(call, rows, columns)
    listed = (tiles.rows, tiles.columns, tiles.q_tile, tiles.k_tile, tiles.ranges)
    return ListedKernelTiles(*listed, call.q_coordinates, call.k_coordinates)


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
            for call, own in calls_of(part, mask):
                listed = listed_tiles(call, rows, columns)
                assert check(batch, name, part.blocks, mask, own, listed) == []


def sample_calls() -> Iterator[tuple[OwnedBlocks, MaskPlan, KernelCall, np.ndarray]]:
    for part in rich_plan().parts:
        mask = part.masks["default"]
        for call, own in calls_of(part, mask):
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
        short = replace(listed, q_tile=listed.q_tile[1:], k_tile=listed.k_tile[1:])
        violations = check(rich_batch(), "default", blocks, mask, own, short)
        found += any("is computed 0 times" in v.sentence for v in violations)
    assert found > 3


def test_a_kernel_tile_listed_twice_is_found() -> None:
    blocks, mask, call, own = next(sample_calls())
    listed = listed_tiles(call, 16, 16)
    q_tile, k_tile = (np.append(tile, tile[0]) for tile in (listed.q_tile, listed.k_tile))
    twice = replace(listed, q_tile=q_tile, k_tile=k_tile)
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
