"""Rows of kernel calls, and the bytes of row work: worked out by hand, and compared with the
contributions of plans."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from dyncp import AttentionShape, Batch, PlannerConfig, masks, plan_batch
from dyncp.blocks import Direction, Payload, Tiles, bytes_per_token
from dyncp.cost import CostModel, find_profile
from dyncp.plan import Space, StyledProgram
from dyncp.simulate import (
    Layer,
    RowCosts,
    Sent,
    call_work,
    count_row_bytes,
    layer_of_plan,
    more_seconds,
)
from dyncp.topology import preset
from kernels_only import KERNELS_ONLY

SHAPE = AttentionShape(4, 2, 8)
GROUPS = SHAPE.head_groups(1)
BYTES = bytes_per_token(SHAPE, GROUPS)[:, 0]
Q, KV, PER_HEAD = 4 * 8 * 2, 2 * 2 * 8 * 2, 4 * 4  # bytes of a token
TOKENS = 10
EAGER = CostModel(find_profile("h200"), SHAPE, graphs=False)
BARE = CostModel(KERNELS_ONLY, AttentionShape(32, 8, 128))
Called = list[tuple[int, int, int]]  # cell, query block and key block of every tile
Payloads = list[tuple[int, int, int, Payload, int]]  # phase, source, target, kind and block


def make_layer(
    direction: Direction, tokens: int, called: Called, sent: Payloads, cost: CostModel
) -> Layer:
    """Ranks 0 and 1 own a block of `tokens` tokens each. There are two divisions: cells 0 and 1
    belong to rank 0, cells 2 and 3 to rank 1."""
    cell, q_block, k_block = np.array(called, np.int64).reshape(-1, 3).T
    phase, source, target, kind, block = np.array(sent, np.int64).reshape(-1, 5).T
    pairs, side = np.full(len(cell), tokens**2), np.full(len(cell), tokens)
    groups = cost.shape.head_groups(1)
    return Layer(
        direction,
        num_ranks=2,
        num_divisions=2,
        num_phases=2,
        groups=groups,
        tokens=np.array([tokens, tokens]),
        owner=np.array([0, 1]),
        sequence=np.array([0, 1]),
        tiles=Tiles(q_block, k_block, np.zeros_like(cell), pairs),
        cell=cell,
        tile_seconds=cost.tile_seconds(pairs, side, side, cost.shape.q_heads, direction),
        sent=Sent(phase, source, target, kind, np.zeros_like(kind), block, tokens * BYTES[kind]),
    )


# Cell 0: query block 0 attends key blocks 0 and 1, block 1 only block 1. Cell 2: one tile.
CALLED = [(0, 0, 0), (0, 0, 1), (0, 1, 1), (2, 1, 0)]


@pytest.mark.parametrize("direction", Direction)
def test_calls_have_the_rows_of_their_blocks_and_the_longest_of_them(direction: Direction) -> None:
    layer = make_layer(direction, 256, CALLED, [], BARE)
    work = call_work(layer, BARE)
    assert work.cell.tolist() == [0, 2]
    assert work.area.tolist() == [32 * 3 * 256 * 256, 32 * 256 * 256]
    assert work.rows.tolist() == [32 * 4, 32 * 2]  # kernel tiles of 128 rows
    assert work.longest.tolist() == [512, 256]


@pytest.mark.parametrize("direction", Direction)
def test_rows_cost_keys_and_a_call_is_no_shorter_than_its_longest(direction: Direction) -> None:
    def more(**changes: float) -> list[float]:
        cost = CostModel(replace(BARE.profile, **changes), BARE.shape)
        layer = make_layer(direction, 256, CALLED, [], cost)
        return more_seconds(layer, cost).reshape(-1).tolist()

    def seconds(pairs: float) -> float:
        return float(BARE.flops(np.array(pairs), 1, direction) / BARE.attention_rate(direction))

    rows = more(row_forward=100.0, row_backward=100.0)
    assert rows == pytest.approx([seconds(100 * 128 * 128), 0, seconds(100 * 128 * 64), 0])
    # 128 and 64 rows of kernel tiles on 2 lanes: half a row of two lanes is idle at the end.
    work = [32 * 3 * 256 * 256, 32 * 256 * 256]
    idle = more(lanes=2)
    assert idle == pytest.approx([seconds(work[0] / 128), 0, seconds(work[1] / 64), 0])
    alone, longest = more(lanes=1000), [1000 * 128 * 512, 1000 * 128 * 256]
    expected = [seconds(longest[0] - work[0]), 0, seconds(longest[1] - work[1]), 0]
    assert alone == pytest.approx(expected)
    assert more() == pytest.approx([0, 0, 0, 0])


def moved(
    direction: Direction,
    called: Called,
    *sent: tuple[int, int, int, Payload, int],
    graphs: bool = False,
) -> RowCosts:
    """Bytes of blocks of 10 tokens."""
    cost = replace(EAGER, graphs=graphs)
    layer = make_layer(direction, TOKENS, called, list(sent), cost)
    return count_row_bytes(layer, cost)


KEYS = (0, 0, 1, Payload.KV, 0)
ATTENDED = [(0, 0, 0), (2, 1, 1), (3, 1, 0)]  # rank 1: its own keys, then those of rank 0


def test_keys_that_travel_are_packed_at_the_start_and_unpacked_when_they_arrive() -> None:
    """Rank 1 attends its own keys in division 0 and those of rank 0 in division 1."""
    found = moved(Direction.FORWARD, ATTENDED, KEYS)
    # Packed; copied to the workspace with the slot.
    assert found.start.tolist() == [2 * 10 * KV, 2 * 10 * KV]
    assert found.wait.tolist() == [[0, 0], [2 * 10 * KV, 0]]
    assert not found.launch.any()
    # Two partial outputs are read and one is written; rank 0 has one, which is final.
    assert found.end.tolist() == [0, 3 * 10 * (Q + PER_HEAD)]
    assert found.per_rank[1].tolist() == [1, 3]


def test_for_graphs_all_inputs_and_results_of_ranks_with_messages_are_copied() -> None:
    found = moved(Direction.FORWARD, ATTENDED, KEYS, graphs=True)
    assert found.start.tolist() == [2 * 10 * (Q + 2 * KV), 2 * 10 * (Q + KV)]
    assert found.end.tolist() == [2 * 10 * (Q + PER_HEAD), 3 * 10 * (Q + PER_HEAD)]


def test_what_several_ranks_get_in_one_phase_is_packed_once() -> None:
    found = moved(Direction.FORWARD, [(0, 0, 0)], KEYS, KEYS, (1, 0, 1, Payload.KV, 0))
    assert found.start[0] == 2 * 2 * 10 * KV


def test_results_are_made_when_they_leave_and_merged_at_the_end() -> None:
    """Rank 1 computes rows of rank 0 in two divisions, and sends the sum back."""
    called = [(0, 0, 0), (2, 0, 1), (3, 0, 1)]
    sent = (0, 0, 1, Payload.Q, 0), (1, 1, 0, Payload.OUT, 0)
    found = moved(Direction.FORWARD, called, *sent)
    out = 10 * (Q + PER_HEAD)
    assert found.launch.tolist() == [[0, 0], [0, 2 * out + out]]
    assert found.end.tolist() == [out + out + out, out]  # written, own, received


def test_backward_accumulators_are_cleared_read_and_rounded() -> None:
    found = moved(Direction.BACKWARD, ATTENDED, KEYS, (1, 1, 0, Payload.DKV, 0))
    wide = 2 * (Q + KV)
    own = 10 * (2 * Q + PER_HEAD + wide)  # row sums from out and dout; accumulators cleared
    assert found.start.tolist() == [own + 2 * 10 * KV, own + 2 * 10 * KV + 10 * 2 * KV]
    assert found.launch.tolist() == [[0, 0], [0, 10 * 2 * KV + 10 * KV]]
    assert found.end.tolist() == [10 * (wide + Q + KV) + 10 * KV, 10 * (wide + Q + KV)]


def test_a_launch_costs_its_gap_and_its_bytes() -> None:
    found = moved(Direction.BACKWARD, ATTENDED, KEYS, (1, 1, 0, Payload.DKV, 0))
    seconds = found.seconds(EAGER)
    gap, rate = EAGER.profile.launch_seconds, 2 * EAGER.profile.copy
    assert seconds.end[1] == pytest.approx(gap + found.end[1] / rate)
    assert seconds.launch[0, 0] == 0


@pytest.mark.parametrize("solver", ["owner_computes", "zigzag", "ulysses"])
def test_forward_every_contribution_of_a_plan_is_read_once(solver: str) -> None:
    shape, topology = AttentionShape(8, 2, 64), preset("h200", 2, 2)
    batch = Batch.of([masks.causal(n) for n in (5000, 900, 300)])
    plan = plan_batch(batch, topology, shape, PlannerConfig(solver=solver))
    cost = CostModel(find_profile("h200"), shape)
    layer, _ = layer_of_plan(plan, "default", Direction.FORWARD, cost)
    found = count_row_bytes(layer, cost)
    sizes = bytes_per_token(shape, plan.parts[0].head_groups)[Payload.OUT]
    for part in plan.parts:
        mask = part.mask_plan("default")
        some = StyledProgram(part, mask, Direction.FORWARD).contributions
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
