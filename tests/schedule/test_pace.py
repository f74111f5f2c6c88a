"""How many bytes each phase has, and which tiles run until they arrive."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import Direction, build_graph
from dyncp.cost import CostModel, find_profile
from dyncp.placement import SOLVERS, Limits
from dyncp.schedule import Pace, build_schedule
from dyncp.schedule.pace import SAFETY, Load, fill, share_phases
from dyncp.schedule.routes import Work
from dyncp.topology import preset
from sizes import draws

SECONDS = st.just(0.0) | st.floats(1e-6, 1.0)


@draws(300)
@given(
    load=st.builds(Load, *[SECONDS] * 6),
    divisions=st.integers(2, 9),
    least=SECONDS,
    results=st.booleans(),
)
def test_shares_grow_up_to_one_in_the_phases_allowed(load, divisions, least, results):
    near, far = share_phases(load, divisions, least, results=results)
    assert len(near) == len(far) < divisions
    for shares, travel in ((near, load.near_travel), (far, load.far_travel)):
        assert shares[-1] == 1
        steps = np.diff(shares, prepend=0)
        assert (steps[: np.argmax(shares == 1) + 1] > 0).all()
        assert (steps >= 0).all()
        full = steps[: np.argmax(shares == 1)]  # the last one takes the rest
        assert (full * travel >= least * (1 - 1e-9)).all()


def test_shares_are_what_computation_can_hide():
    """Local tiles hide half of the bytes; the tiles of division 1 hide the rest."""
    load = Load(local=2, near=4, far=0, near_travel=4, far_travel=0, result_travel=0)
    near, far = share_phases(load, 4, 0.0, results=False)
    assert (near.tolist(), far.tolist()) == ([0.5, 1], [1, 1])


def test_with_results_no_phase_has_much_more_than_its_part():
    load = Load(local=9, near=9, far=0, near_travel=1, far_travel=0, result_travel=0)
    assert share_phases(load, 4, 0.0, results=False)[0].tolist() == [1]
    assert share_phases(load, 4, 0.0, results=True)[0].tolist() == [0.5, 1]


@st.composite
def fillings(draw):
    """Tiles of up to 3 ranks: local tiles, and tiles whose inputs arrive for divisions 1 to 4."""
    tiles = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    waits = rng.random(tiles) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    division = np.where(waits, rng.integers(1, 5, tiles), 0)
    slow = waits & (rng.random(tiles) < draw(st.sampled_from([0.5, 1.0])))
    work = Work(rng.integers(0, 3, tiles), rng.random(tiles), np.stack([waits - 1, waits - 1]))
    arrivals = np.cumsum(rng.random(draw(st.integers(1, 4)))) * draw(st.sampled_from([0, 1, 9]))
    results = rng.random(draw(st.integers(0, 2)))
    return division, slow, work, arrivals, results, rng.permutation(tiles)


@draws(300)
@given(case=fillings())
def test_fillers_run_after_their_inputs_and_slow_tiles_stay(case):
    division, slow, work, arrivals, results, turn = case
    filled = fill(division, slow, work, arrivals, results, 3, turn)
    assert (filled >= division).all()
    assert (filled[slow] == division[slow]).all()
    if division.any():
        assert filled.max() <= division.max() + len(results)
    else:
        assert not filled.any()


@pytest.mark.parametrize(("arrival", "at_start"), [(0.0, 0), (2.5, 3), (100.0, 5)])
def test_local_tiles_fill_the_time_until_slow_inputs_arrive(arrival, at_start):
    """One rank: a slow tile for division 1 and five local ones of 1 s."""
    use = np.array([[0, -1, -1, -1, -1, -1]] * 2)
    division, slow = np.array([1, 0, 0, 0, 0, 0]), np.array([True] + [False] * 5)
    work = Work(np.zeros(6, np.int64), np.ones(6), use)
    filled = fill(division, slow, work, np.array([arrival]), np.array([1.0]), 1, np.arange(6))
    assert (filled == 0).sum() == at_start == min(int(SAFETY * arrival), 5)
    assert (filled[1:][filled[1:] > 0] == 2).all()  # after the slow one, to hide its result


@pytest.mark.parametrize("direction", list(Direction))
def test_without_communication_there_is_one_division(direction):
    batch = Batch.of([masks.causal(16)] * 4)
    graph = build_graph(batch, AttentionShape(2, 1, 8), [16] * 4)
    placement = SOLVERS["owner_computes"].place(graph, Topology(1, 4), Limits(), 0)
    schedule = build_schedule(graph, placement, "default", direction, 4)
    assert (schedule.num_divisions, schedule.num_phases) == (1, 0)
    assert not schedule.tile_division.any()


def test_a_division_costs_its_launches_and_forward_what_is_merged_once_more():
    shape, profile = AttentionShape(4, 2, 8), find_profile("h200")
    plain = dataclasses.replace(profile, launch_seconds=0.0, host_seconds=0.0)
    for direction in Direction:
        whole, kernels = (
            CostModel(p, shape).division_seconds(100, direction) for p in (profile, plain)
        )
        out = 100 * 4 * (8 * 2 + 4) / (2 * profile.copy) if direction is Direction.FORWARD else 0.0
        assert whole - kernels == pytest.approx(2 * profile.launch_seconds + out)


def test_a_phase_is_worth_at_least_what_the_host_needs_for_it():
    cost = CostModel(find_profile("h200"), AttentionShape(4, 2, 8), graphs=False)
    least = Pace(Topology(1, 4), cost).least_seconds(100, Direction.FORWARD)
    assert least == 3 * cost.profile.host_seconds_eager


def test_where_the_host_is_slow_inputs_come_in_fewer_phases():
    shape, topology = AttentionShape(32, 8, 128), preset("h200", 2, 2)
    graph = build_graph(Batch.of([masks.causal(32768)]), shape, [2048])
    placement = SOLVERS["owner_computes"].place(graph, topology, Limits(), 0)
    phases = []
    for graphs in (True, False):
        pace = Pace(topology, CostModel(find_profile("h200"), shape, graphs=graphs))
        found = build_schedule(graph, placement, "default", Direction.BACKWARD, 8, pace)
        phases.append(found.num_phases)
    assert phases[1] < phases[0]
