"""Bytes that calls read and write beside their kernels: by hand, and against the contributions of
plans."""

from collections import defaultdict

import numpy as np
import pytest

from dyncp import AttentionShape, Batch, PlannerConfig, masks, plan_batch
from dyncp.blocks import Direction, Payload, bytes_per_token
from dyncp.cost import CostModel, find_profile
from dyncp.cost.cost_model import RowBytes, RowCosts, Sent, Touched
from dyncp.plan import Space, find_contributions
from dyncp.simulate.flow import row_bytes_of_plan
from dyncp.topology import preset

SHAPE = AttentionShape(4, 2, 8)
GROUPS = SHAPE.head_groups(1)
BYTES = bytes_per_token(SHAPE, GROUPS)[:, 0]
Q, KV, PER_HEAD = 4 * 8 * 2, 2 * 2 * 8 * 2, 4 * 4  # bytes of a token
TOKENS = 10


def rows(direction: Direction, *, fixed: bool = False) -> RowCosts:
    """Ranks 0 and 1 own a block of 10 tokens each."""
    tokens, owner = np.array([TOKENS, TOKENS]), np.array([0, 1])
    return RowCosts(2, 2, 2, tokens, owner, direction, RowBytes(SHAPE, GROUPS), fixed)


def sent(*payloads: tuple[int, int, int, Payload, int]) -> Sent:
    """Phase, source, target, kind and block of each."""
    phase, source, target, kind, block = (np.array(c) for c in zip(*payloads, strict=True))
    group = np.zeros_like(phase)
    return Sent(phase, source, target, kind, group, block, TOKENS * BYTES[kind])


def test_keys_that_travel_are_packed_at_the_start_and_unpacked_when_they_arrive() -> None:
    """Rank 1 attends its own keys in division 0 and those of rank 0 in division 1."""
    touched = Touched(np.array([0, 2, 3]), np.zeros(3, np.int64), np.array([0, 1, 1]))
    found = rows(Direction.FORWARD).moved(sent((0, 0, 1, Payload.KV, 0)), touched)
    assert found.start.tolist() == [2 * 10 * KV, 2 * 10 * KV]  # packed; copied beside the slot
    assert found.wait.tolist() == [[0, 0], [2 * 10 * KV, 0]]
    assert not found.launch.any()
    # Two partial outputs are read and one is written; rank 0 has one, which is final.
    assert found.end.tolist() == [0, 3 * 10 * (Q + PER_HEAD)]
    assert found.launches_per_rank.tolist() == [1, 3]


def test_for_graphs_all_inputs_and_results_of_ranks_with_messages_are_copied() -> None:
    touched = Touched(np.array([0, 2, 3]), np.zeros(3, np.int64), np.array([0, 1, 1]))
    found = rows(Direction.FORWARD, fixed=True).moved(sent((0, 0, 1, Payload.KV, 0)), touched)
    assert found.start.tolist() == [2 * 10 * (Q + 2 * KV), 2 * 10 * (Q + KV)]
    assert found.end.tolist() == [2 * 10 * (Q + PER_HEAD), 3 * 10 * (Q + PER_HEAD)]


def test_what_several_ranks_get_in_one_phase_is_packed_once() -> None:
    twice = sent((0, 0, 1, Payload.KV, 0), (0, 0, 1, Payload.KV, 0), (1, 0, 1, Payload.KV, 0))
    touched = Touched(np.array([0]), np.zeros(1, np.int64), np.array([0]))
    found = rows(Direction.FORWARD).moved(twice, touched)
    assert found.start[0] == 2 * 2 * 10 * KV


def test_results_are_made_when_they_leave_and_merged_at_the_end() -> None:
    """Rank 1 computes rows of rank 0 in two divisions, and sends the sum back."""
    moved = sent((0, 0, 1, Payload.Q, 0), (1, 1, 0, Payload.OUT, 0))
    touched = Touched(np.array([0, 2, 3]), np.zeros(3, np.int64), np.array([0, 0, 0]))
    found = rows(Direction.FORWARD).moved(moved, touched)
    out = 10 * (Q + PER_HEAD)
    assert found.launch.tolist() == [[0, 0], [0, 2 * out + out]]
    assert found.end.tolist() == [out + out + out, out]  # written, own, received


def test_backward_accumulators_are_cleared_read_and_rounded() -> None:
    moved = sent((0, 0, 1, Payload.KV, 0), (1, 1, 0, Payload.DKV, 0))
    found = rows(Direction.BACKWARD).moved(moved, None)
    wide = 2 * (Q + KV)
    own = 10 * (2 * Q + PER_HEAD + wide)  # row sums from out and dout; accumulators cleared
    assert found.start.tolist() == [own + 2 * 10 * KV, own + 2 * 10 * KV + 10 * 2 * KV]
    assert found.launch.tolist() == [[0, 0], [0, 10 * 2 * KV + 10 * KV]]
    assert found.end.tolist() == [10 * (wide + Q + KV) + 10 * KV, 10 * (wide + Q + KV)]


def test_a_launch_costs_its_gap_and_its_bytes() -> None:
    cost = CostModel(find_profile("h200"), SHAPE)
    moved = sent((0, 0, 1, Payload.KV, 0), (1, 1, 0, Payload.DKV, 0))
    found = rows(Direction.BACKWARD).moved(moved, None)
    seconds = found.seconds(cost)
    gap, rate = cost.profile.launch_seconds, 2 * cost.profile.copy
    assert seconds.end[1] == pytest.approx(gap + found.end[1] / rate)
    assert seconds.launch[0, 0] == 0


@pytest.mark.parametrize("solver", ["owner_computes", "zigzag", "ulysses"])
def test_forward_every_contribution_of_a_plan_is_read_once(solver: str) -> None:
    shape, topology = AttentionShape(8, 2, 64), preset("h200", 2, 2)
    batch = Batch.of([masks.causal(n) for n in (5000, 900, 300)])
    plan = plan_batch(batch, topology, shape, PlannerConfig(solver=solver))
    cost = CostModel(find_profile("h200"), shape)
    found = row_bytes_of_plan(plan, "default", Direction.FORWARD, cost)
    sizes = bytes_per_token(shape, plan.parts[0].head_groups)[Payload.OUT]
    for part in plan.parts:
        mask = part.mask_plan("default")
        some = find_contributions(part, mask, mask.forward)
        read: dict[bool, float] = defaultdict(float)
        for space, group, block in zip(some.space, some.head_group, some.block, strict=True):
            assert space == Space.Q
            own = bool(part.blocks.owner[block] == part.rank)
            read[own] += float(part.blocks.tokens[block] * sizes[group])
        sends, tokens = mask.forward.sends, part.blocks.tokens
        received = mask.forward.receives
        for at in np.flatnonzero(received.kind == Payload.OUT):
            own = bool(part.blocks.owner[received.block[at]] == part.rank)
            read[own] += float(tokens[received.block[at]] * sizes[received.head_group[at]])
        results = sends.kind == Payload.OUT
        written = (tokens[sends.block] * sizes[sends.head_group])[results].sum()
        passed = (sends.kind != Payload.OUT) & (part.blocks.owner[sends.block] != part.rank)
        per_token = bytes_per_token(shape, part.head_groups)
        packed = (tokens[sends.block] * per_token[sends.kind, sends.head_group])[passed].sum()
        assert found.launch[part.rank].sum() == read[False] + written + 2 * packed
        if found.end[part.rank]:
            assert found.end[part.rank] == read[True] + part.local_tokens * sizes.sum()
