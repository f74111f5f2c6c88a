"""Instructions wait for the host, and computing takes longer while messages are in flight: worked
out by hand, and as bounds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulate_cases import Case, cases, make_case, run_by_hand, simple_topology

from dyncp.blocks import AttentionShape, Direction
from dyncp.cost import CostModel, find_profile
from dyncp.plan import Op
from dyncp.simulate import AttentionTimes, simulate_schedule
from dyncp.topology import Topology, preset
from sizes import draws

LAUNCH, WAIT, COMPUTE = Op.LAUNCH, Op.WAIT, Op.COMPUTE
MESSAGE = [(0, 0, 1, 50.0)]  # 5 s on the ports of both ranks, and 1 s of latency
TWO = simple_topology(1, 2).scaled(latency=0.0)
both_orders = pytest.mark.parametrize("two", [TWO, replace(TWO, ordered_phases=False)])


def test_an_instruction_starts_when_the_host_has_issued_it() -> None:
    times = run_by_hand([[(COMPUTE, d, 1.0) for d in range(3)]], [], simple_topology(1, 1), host=2)
    assert times.steps["begin"].tolist() == [2, 4, 6]
    assert times.seconds == 7
    assert times.rank_host_seconds.tolist() == [4]
    assert times.rank_waiting_seconds.tolist() == [0]


def test_the_host_runs_ahead_of_long_instructions() -> None:
    steps = [(COMPUTE, 0, 9.0), (COMPUTE, 1, 1.0)]
    times = run_by_hand([steps], [], simple_topology(1, 1), host=2)
    assert times.seconds == 2 + 9 + 1
    assert times.rank_host_seconds.tolist() == [2]


def test_waiting_for_a_message_and_for_the_host_are_told_apart() -> None:
    programs = [[(LAUNCH, 0, 0.0)], [(LAUNCH, 0, 0.0), (WAIT, 0, 0.0)]]
    times = run_by_hand(programs, MESSAGE, simple_topology(1, 2), host=2)
    assert times.seconds == 2 + 5 + 1
    assert times.rank_host_seconds[1] == 4
    assert times.rank_waiting_seconds[1] == 4


@both_orders
@pytest.mark.parametrize("rank", [0, 1])
def test_computing_beside_a_message_takes_longer_at_both_ends(rank: int, two: Topology) -> None:
    programs = [[(LAUNCH, 0, 0.0), (COMPUTE, 0, 10.0)] for _ in range(2)]
    times = run_by_hand(programs, MESSAGE, two, slowdown=2.0)
    assert times.rank_compute_seconds[rank] == 10 + 5 / 2


@both_orders
def test_computing_that_ends_beside_a_message_takes_all_of_the_slowdown(two: Topology) -> None:
    programs = [[(LAUNCH, 0, 0.0)], [(LAUNCH, 0, 0.0), (COMPUTE, 0, 2.0), (COMPUTE, 1, 2.0)]]
    times = run_by_hand(programs, MESSAGE, two, slowdown=2.0)
    assert times.steps["end"][2:].tolist() == [4, 4 + 1 + (2 - 1 / 2)]


@both_orders
def test_a_message_that_sets_out_later_slows_what_is_left(two: Topology) -> None:
    programs = [
        [(COMPUTE, 0, 6.0), (LAUNCH, 0, 0.0)],
        [(LAUNCH, 0, 0.0), (COMPUTE, 0, 10.0), (WAIT, 0, 0.0)],
    ]
    times = run_by_hand(programs, MESSAGE, two, slowdown=1.25)
    # At 6 there are 4 s left; 5 s during the message do as much as 4 s without it.
    assert times.rank_compute_seconds[1] == pytest.approx(11)
    assert times.seconds == pytest.approx(11)


def run(case: Case, direction: Direction, **changes: float) -> AttentionTimes:
    profile = replace(case.cost.profile, **changes)
    return simulate_schedule(
        case.graph,
        case.placement,
        case.schedules["default"][direction],
        direction,
        case.topology,
        replace(case.cost, profile=profile),
    )


@given(cases(), st.sampled_from(Direction))
@draws(40)
def test_without_a_slowdown_computing_by_events_changes_nothing(
    case: Case, direction: Direction
) -> None:
    plain = run(case, direction, overlap_slowdown=1.0)
    events = run(case, direction, overlap_slowdown=1 + 1e-12)
    np.testing.assert_allclose(events.steps["end"], plain.steps["end"], rtol=1e-9)


@given(cases(), st.sampled_from(Direction))
@draws(40)
def test_no_rank_computes_longer_than_the_slowdown_says(case: Case, direction: Direction) -> None:
    plain = run(case, direction, overlap_slowdown=1.0).rank_compute_seconds
    slow = run(case, direction, overlap_slowdown=1.5).rank_compute_seconds
    assert (slow >= plain * (1 - 1e-9)).all()
    assert (slow <= 1.5 * plain * (1 + 1e-9)).all()


def test_without_graphs_the_host_takes_longer() -> None:
    graphs, eager = (
        CostModel(find_profile("h200"), AttentionShape(), graphs=g) for g in (True, False)
    )
    assert 0 < graphs.host_seconds < eager.host_seconds
    case = make_case([9000, 1000], preset("h200", 1, 4), "random", profile=graphs.profile)
    without = replace(case, cost=replace(case.cost, graphs=False))
    assert run(without, Direction.BACKWARD).seconds > run(case, Direction.BACKWARD).seconds
