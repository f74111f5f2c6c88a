"""Contents of a plan's parts: rows, slots, instructions; gathering rows into samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import cases
from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    PlannerConfig,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.blocks import Direction
from dyncp.placement import Limits
from dyncp.plan import Layout, Op, Payload
from dyncp.plan.slots import place_slots
from dyncp.verify import verify_plan
from paced import plan_paced
from sizes import draws
from strategies import masks_of


@draws(100)
@given(data=st.data(), length=st.integers(1, 60), size=st.integers(1, 70))
def test_row_runs_expand_to_the_masks_ranges(data, length, size):
    chosen = [data.draw(masks_of(n)) for n in (length, 7)]
    part = plan_batch(
        Batch.of(chosen), Topology(), planner=PlannerConfig("random", block_size=size)
    ).parts[0]
    blocks, runs = part.blocks, part.masks["default"].rows
    borders = zip(blocks.sequence, blocks.start, blocks.end, strict=True)
    for index, (sequence, start, end) in enumerate(borders):
        dense = np.zeros((end - start, chosen[sequence].length), bool)
        # Blocks that attend nothing have no tiles, and no runs.
        ranges = runs.expand(index, start, end) if index in runs.block else []
        for row, row_ranges in enumerate(ranges):
            for first, last in row_ranges:
                dense[row, first:last] = True
        assert (dense == chosen[sequence].dense()[start:end]).all()


def test_builtin_masks_take_a_few_runs_per_block():
    for mask, most in ((masks.causal(4096), 4), (masks.lambda_shaped(4096, window=300), 8)):
        config = PlannerConfig("random", block_size=1024)
        plan = plan_batch(Batch.of([mask]), Topology(), planner=config)
        assert len(plan.parts[0].masks["default"].rows) <= most


@draws(200)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 5)), max_size=25
    )
)
def test_slots_never_overlap_while_in_use_and_reuse_what_is_free(spans):
    first = np.array([min(a, b) for a, b, _ in spans], np.int64)
    last = np.array([max(a, b) for a, b, _ in spans], np.int64)
    size = np.array([n * 8 for _, _, n in spans], np.int64)
    workspace, shape = np.zeros(len(spans), np.int64), (1, 2, 1)
    rows, workspace_rows = place_slots(workspace, shape, first, last, size, np.array([16]), 8)
    assert (rows % 8 == 0).all()
    assert (rows >= 16).all()
    for i in range(len(spans)):
        for j in range(i):
            together = first[i] <= last[j] and first[j] <= last[i]
            apart = rows[i] + size[i] <= rows[j] or rows[j] + size[j] <= rows[i]
            assert apart or not together
    assert workspace_rows[0, 0, 0] == max([16, *(rows + size)])


def test_slots_are_reused_by_later_divisions():
    batch = Batch.of([masks.causal(64 * 16)])
    shape = AttentionShape(2, 1, 8)
    config = PlannerConfig("zigzag", divisions=8, block_size=64, layout=Layout(64))
    program = plan_batch(batch, Topology(1, 8), shape, config).parts[0].masks["default"].forward
    held = len(program.slots) * 64
    assert program.workspace_rows[1, 0] - 128 < held / 2


def test_parts_are_read_only_and_share_the_block_table():
    batch = Batch.of([masks.lambda_shaped(n) for n in (700, 90)])
    parts = plan_batch(batch, Topology(2, 2), planner=PlannerConfig(block_size=32)).parts
    assert all(part.blocks is parts[0].blocks for part in parts)
    for part in parts:
        plan = part.masks["default"]
        tables = [plan.tiles, plan.rows, plan.forward, plan.forward.sends, plan.forward.slots]
        arrays = [a for t in tables for a in vars(t).values() if isinstance(a, np.ndarray)]
        assert len(arrays) == 4 + 4 + 3 + 5 + 6
        assert not any(array.flags.writeable for array in arrays)


@draws(50)
@given(case=cases())
def test_samples_come_back_from_the_rows_of_all_ranks(case):
    plan = case.plan
    parts = []
    for part in plan.parts:
        rows = np.full(part.local_rows, -1)
        rows[: part.local_tokens] = part.local_coordinates
        parts.append(rows)
    samples = plan.gather(parts)
    assert [len(sample) for sample in samples] == list(case.batch.lengths)
    assert (np.concatenate(samples) == np.arange(case.batch.num_tokens)).all()


def test_gather_refuses_parts_that_do_not_fit():
    plan = plan_batch(Batch.of([masks.causal(8)]), Topology(1, 2))
    with pytest.raises(ValueError, match="1 parts; the plan has 2 ranks"):
        plan.gather([np.zeros(8)])
    with pytest.raises(ValueError, match="9 rows over all ranks; the plan's rows add up to 8"):
        plan.gather([np.zeros(4), np.zeros(5)])


def test_results_go_home_when_their_last_tile_is_done_not_all_at_the_end():
    """Inside one node. With slow links, that is before the last division."""
    batch, shape = Batch.of([masks.full(8)] * 16), AttentionShape(2, 1, 8)
    config = PlannerConfig("random", block_size=4, divisions=4, seed=1)
    plan = plan_paced(batch, Topology(1, 4), shape, config)
    for part in plan.parts:
        mask, program = part.masks["default"], part.masks["default"].forward
        steps = program.instructions.tolist()
        for phase, block in zip(program.sends.phase, program.sends.block, strict=True):
            if program.sends.kind[program.sends.phase == phase][0] != Payload.OUT:
                continue
            last = program.tile_division[mask.tiles.q_block == block].max()
            between = steps[steps.index([Op.COMPUTE, last]) + 1 : steps.index([Op.LAUNCH, phase])]
            assert not any(op == Op.COMPUTE for op, _ in between)
        last_compute = max(i for i, (op, _) in enumerate(steps) if op == Op.COMPUTE)
        returns = set(program.sends.phase[program.sends.kind == Payload.OUT].tolist())
        assert returns & {arg for op, arg in steps[:last_compute] if op == Op.LAUNCH}


def test_local_rows_are_padded_to_a_multiple():
    layout = Layout(slot_alignment=16, local_multiple=8)
    batch = Batch.of([masks.causal(n) for n in (13, 5)])
    plan = plan_batch(batch, Topology(1, 2), planner=PlannerConfig(layout=layout))
    assert all(part.local_rows % 8 == 0 for part in plan.parts)
    assert sum(part.local_tokens for part in plan.parts) == 18


@pytest.mark.parametrize("multiple", [1, 8])
def test_with_a_multiple_above_1_ranks_without_tokens_have_rows_too(multiple):
    batch, shape = Batch.of([masks.causal(5)]), AttentionShape(2, 1, 8, "fp64")
    config = PlannerConfig(block_size=5, layout=Layout(local_multiple=multiple))
    plan = plan_batch(batch, Topology(1, 3), shape, config)
    empty = 0 if multiple == 1 else 8
    assert sorted(part.local_rows for part in plan.parts) == [empty, empty, max(5, empty)]
    assert verify_plan(plan, batch) == []
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    q = torch.randn(step.num_rows, 2, 8, dtype=torch.float64)
    out = step.gather(attention(step, q, q[:, :1], q[:, :1]))
    assert [len(sample) for sample in out] == [5]


def test_a_limit_that_is_not_met_is_said_with_its_numbers():
    limits = Limits(compute_tolerance=0.1, token_tolerance=0.1)
    batch = Batch.of([masks.causal(n) for n in (100, 1)])
    config = PlannerConfig(block_size=100, limits=limits)
    balance = plan_batch(batch, Topology(1, 2), planner=config).parts[0].balance
    assert "compute max/mean is" in balance.reason
    assert "tokens max/mean is 1.980, over the limit of 1.100" in balance.reason


def test_backward_moves_what_forward_does_and_the_gradients():
    batch, shape = Batch.of([masks.causal(64)]), AttentionShape(8, 2, 16, "bf16")
    plan = plan_batch(batch, Topology(1, 2), shape, PlannerConfig("zigzag"))
    forward = plan.total_bytes("default", Direction.FORWARD, shape)
    backward = plan.total_bytes("default", Direction.BACKWARD, shape)
    assert backward == 2 * forward  # zigzag sends KV, and returns dKV of the same size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "best"}, "solver is 'best'; choose one of"),
        ({"block_size": 0}, "block_size is 0; at least 1"),
        ({"divisions": 1}, "divisions is 1; at least 2"),
        ({"head_groups": 0}, "head_groups is 0; at least 1"),
    ],
)
def test_planner_settings_are_checked_when_they_are_made(options, message):
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**options)


def test_more_head_groups_than_kv_heads_are_refused():
    batch = Batch.of([masks.causal(8)])
    with pytest.raises(ValueError, match=r"head_groups is 3; allowed are 1 to 2"):
        plan_batch(batch, Topology(1, 2), AttentionShape(4, 2, 8), PlannerConfig(head_groups=3))
    with pytest.raises(ValueError, match="head counts are not known"):
        plan_batch(batch, Topology(1, 2), planner=PlannerConfig(head_groups=2))


def test_layouts_and_topologies_and_limits_are_checked():
    with pytest.raises(ValueError, match="slot_alignment is 0"):
        Layout(slot_alignment=0)
    with pytest.raises(ValueError, match=r"Topology.ranks_per_node is 0"):
        Topology(1, 0)
    with pytest.raises(ValueError, match=r"token_tolerance is -0\.1"):
        Limits(token_tolerance=-0.1)


def test_a_plan_draws_who_owns_and_who_computes_what():
    batch = Batch.of([masks.causal(4), masks.causal(4)])
    plan = plan_batch(batch, Topology(1, 2), planner=PlannerConfig(block_size=2))
    assert plan.draw(width=4, height=4) == "A|A···\nA|AA··\nB|··B·\nB|··BB"
