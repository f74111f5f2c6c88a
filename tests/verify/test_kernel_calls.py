"""Kernel calls that the executor derives from plans keep invariant 6."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import given
from verify_plans import planned_batches, rich_batch, rich_plan

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology, masks, plan_batch
from dyncp.cli.verify import gpu_kernel_tiles, kernel_calls_of
from dyncp.kernels import KernelCall
from dyncp.kernels.tile_lists import SIDE
from dyncp.plan import MaskPlan, OwnedBlocks
from dyncp.verify import ListedKernelTiles, Violation, check_kernel_call
from sizes import draws, pick

LISTED = ("q_tile", "k_tile", "full")


def check(
    batch: Batch, name: str, blocks: OwnedBlocks, mask: MaskPlan, own: np.ndarray, listed: object
) -> list[Violation]:
    q_block, k_block = mask.tiles.q_block[own], mask.tiles.k_block[own]
    return check_kernel_call(batch, name, blocks, q_block, k_block, listed)


@draws(60)
@given(planned_batches())
def test_tile_lists_allow_exactly_the_pairs_of_the_calls_tiles(
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
            for listed in pick(list(gpu_kernel_tiles(call))[:1], list(gpu_kernel_tiles(call))):
                num_full += int(listed.full.sum())
                assert check(batch, "default", part.blocks, mask, own, listed) == []
                wrong = replace(listed, full=np.ones_like(listed.full))
                assert check(batch, "default", part.blocks, mask, own, wrong)
    assert num_full > pick(5, 10)


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


Sample = tuple[OwnedBlocks, MaskPlan, KernelCall, np.ndarray, ListedKernelTiles]


def sample_calls(plan: Plan) -> Iterator[Sample]:
    for part in plan.parts:
        mask = part.masks["default"]
        for call, own in kernel_calls_of(part, mask):
            for listed in gpu_kernel_tiles(call):
                yield part.blocks, mask, call, own, listed


def test_ranges_that_are_not_cut_are_found_where_kernel_tiles_mix_blocks() -> None:
    found = 0
    for blocks, mask, _, own, listed in sample_calls(rich_plan()):
        every = np.broadcast_to([[0, len(listed.k_coordinates)]], (len(listed.ranges), 1, 2))
        uncut = replace(listed, full=np.zeros_like(listed.full), ranges=every)
        violations = check(rich_batch(), "default", blocks, mask, own, uncut)
        assert {v.invariant for v in violations} <= {6}
        found += any("belongs to 0 tiles" in v.sentence for v in violations)
    assert found > 3


def test_a_missing_kernel_tile_is_found() -> None:
    found, (batch, plan) = 0, long_plan()
    for blocks, mask, _, own, listed in sample_calls(plan):
        short = replace(listed, **{f: getattr(listed, f)[1:] for f in LISTED})
        violations = check(batch, "default", blocks, mask, own, short)
        found += any("is computed 0 times" in v.sentence for v in violations)
    assert found > 3


def test_a_kernel_tile_listed_twice_is_found() -> None:
    blocks, mask, _, own, listed = next(sample_calls(rich_plan()))
    columns = {f: getattr(listed, f) for f in LISTED}
    twice = replace(listed, **{f: np.append(column, column[0]) for f, column in columns.items()})
    violations = check(rich_batch(), "default", blocks, mask, own, twice)
    assert any("is computed 2 times" in v.sentence for v in violations)


def test_coordinates_of_another_block_are_found() -> None:
    blocks, mask, call, own, listed = next(sample_calls(rich_plan()))
    shifted = np.where(call.k_coordinates >= 0, (call.k_coordinates + 1) % 51, -1)
    shifted = replace(listed, k_coordinates=shifted)
    assert check(rich_batch(), "default", blocks, mask, own, shifted)


def test_kernel_tiles_that_do_not_exist_are_reported_not_raised() -> None:
    blocks, mask, _, own, listed = next(sample_calls(rich_plan()))
    for broken in (
        replace(listed, q_tile=listed.q_tile + 99),
        replace(listed, k_tile=listed.k_tile[1:]),
        replace(listed, q_coordinates=listed.q_coordinates + 99),
    ):
        violations = check(rich_batch(), "default", blocks, mask, own, broken)
        assert {v.invariant for v in violations} == {6}
