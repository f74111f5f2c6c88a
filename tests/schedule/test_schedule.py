"""Schedules: divisions, phases and their order."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import Direction, build_graph
from dyncp.placement import SOLVERS, Limits, minimal_bytes
from dyncp.schedule import build_schedule
from strategies import masks_of

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def schedule_of(chosen, num_ranks, divisions, direction, seed=0):
    shape = AttentionShape(4, 2, 8)
    graph = build_graph(Batch.of(chosen), shape, [4] * len(chosen), 2)
    placement = SOLVERS["random"].place(graph, Topology(1, num_ranks), Limits(), seed)
    return graph, placement, build_schedule(graph, placement, "default", direction, divisions)


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    num_ranks=st.integers(1, 5),
    divisions=st.integers(2, 6),
    direction=st.sampled_from(list(Direction)),
)
def test_schedules_keep_their_promises(data, lengths, num_ranks, divisions, direction):
    chosen = [data.draw(masks_of(n)) for n in lengths]
    graph, placement, schedule = schedule_of(chosen, num_ranks, divisions, direction)
    tiles, moved = graph.tiles["default"], schedule.transfers
    assert schedule.num_divisions <= divisions
    local = (placement.block_rank[tiles.q_block] == placement.tile_rank["default"]) & (
        placement.block_rank[tiles.k_block] == placement.tile_rank["default"]
    )
    assert ((schedule.tile_division == 0) == local).all()
    size = graph.payload_bytes[moved.kind, moved.head_group] * graph.blocks.tokens[moved.block]
    assert size.sum() == minimal_bytes(graph, placement, "default", direction)
    keys = np.stack(
        [moved.phase, moved.source, moved.target, moved.kind, moved.head_group, moved.block]
    )
    assert (np.lexsort(keys[::-1]) == np.arange(len(moved))).all()
    assert (np.diff(schedule.phase_after_division) >= 0).all()
    assert (schedule.phase_after_phase < np.arange(schedule.num_phases)).all()
    assert (schedule.phase_after_division < schedule.phase_feeds).all()


def test_inputs_are_spread_over_the_divisions():
    _, _, schedule = schedule_of([masks.full(256)], 2, 5, Direction.FORWARD)
    counts = np.bincount(schedule.tile_division)
    assert len(counts) == 5
    assert (counts > 0).all()


def test_inputs_of_a_division_travel_while_the_one_before_computes():
    _, _, schedule = schedule_of([masks.full(256)], 3, 4, Direction.FORWARD)
    inputs = schedule.phase_feeds < schedule.num_divisions
    assert schedule.phase_feeds[inputs].tolist() == [1, 2, 3]
    assert schedule.phase_after_division[inputs].tolist() == [-1, 0, 1]
    results = schedule.phase_after_division[~inputs].tolist()
    assert results == sorted(set(results) & {1, 2, 3})
    assert results[-1] == 3
