"""Messages written by hand take the seconds that can be worked out on paper."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulate_cases import Message, exchange, run_by_hand, simple_topology

from dyncp.plan import Op
from dyncp.topology import Link, Topology
from sizes import draws

LAUNCH, WAIT, COMPUTE = Op.LAUNCH, Op.WAIT, Op.COMPUTE


def test_a_message_takes_latency_plus_bytes_over_bandwidth() -> None:
    times = exchange(2, [(0, 0, 1, 50.0)], simple_topology(1, 2))
    assert times.seconds == 1 + 50 / 10


def test_a_message_between_nodes_uses_the_network() -> None:
    times = exchange(2, [(0, 0, 1, 50.0)], simple_topology(2, 1))
    assert times.seconds == 2 + 50 / 4


def test_two_messages_from_one_rank_share_its_port() -> None:
    times = exchange(3, [(0, 0, 1, 50.0), (0, 0, 2, 50.0)], simple_topology(1, 3))
    assert times.rank_seconds.tolist() == [0, 1 + 5, 1 + 10]


def test_two_messages_to_one_rank_share_its_port() -> None:
    times = exchange(3, [(0, 1, 2, 50.0), (0, 0, 2, 50.0)], simple_topology(1, 3))
    assert times.messages["arrival"].tolist() == [1 + 5, 1 + 10]


def test_ports_work_in_both_directions_at_once() -> None:
    times = exchange(2, [(0, 0, 1, 50.0), (0, 1, 0, 50.0)], simple_topology(1, 2))
    assert times.rank_seconds.tolist() == [6, 6]


def test_ranks_of_one_node_share_its_network() -> None:
    alone = exchange(4, [(0, 0, 2, 50.0)], simple_topology(2, 2))
    shared = exchange(4, [(0, 0, 2, 50.0), (0, 1, 3, 50.0)], simple_topology(2, 2))
    assert alone.seconds - 2 == (shared.seconds - 2) / 2


def test_ranks_with_their_own_nic_do_not_share_it() -> None:
    topology = simple_topology(2, 2, nics=2)
    alone = exchange(4, [(0, 0, 2, 50.0)], topology)
    both = exchange(4, [(0, 0, 2, 50.0), (0, 1, 3, 50.0)], topology)
    assert alone.seconds == both.seconds == 2 + 50 / 2


def test_neighbouring_ranks_share_a_nic() -> None:
    def through_nics(ranks: int, nics: int) -> list[float]:
        """Bytes out of the NICs of node 0, if rank r sends 10^r bytes to the other node."""
        messages = [(0, r, r + ranks, 10.0**r) for r in range(ranks)]
        times = exchange(2 * ranks, messages, simple_topology(2, ranks, nics))
        return times.ports["moved"][4 * ranks :][:nics].tolist()

    assert through_nics(8, 4) == [11, 1100, 110_000, 11_000_000]
    assert through_nics(2, 4) == [1, 0, 10, 0]
    assert through_nics(3, 1) == [111]


def test_messages_inside_a_node_and_between_nodes_do_not_share() -> None:
    times = exchange(4, [(0, 0, 1, 50.0), (0, 0, 2, 50.0)], simple_topology(2, 2))
    assert times.messages["arrival"].tolist() == [1 + 50 / 10, 2 + 50 / 4]


def test_an_all_to_all_keeps_every_port_busy() -> None:
    ranks = 8
    messages = sorted(
        ((0, s, t, 30.0) for s in range(ranks) for t in range(ranks) if s != t),
        key=lambda m: ((m[2] - m[1]) % ranks, m[1]),
    )
    times = exchange(ranks, messages, simple_topology(1, ranks))
    assert times.seconds == pytest.approx(1 + (ranks - 1) * 3)


@st.composite
def exchanges(draw: Any) -> tuple[int, int, list[Message]]:
    """Messages of one phase between up to 3 nodes of up to 4 ranks."""
    nodes, ranks = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    rank = st.integers(0, nodes * ranks - 1)
    ends = draw(
        st.sets(st.tuples(rank, rank).filter(lambda e: e[0] != e[1]), min_size=1, max_size=20)
    )
    return nodes, ranks, [(0, *e, draw(st.integers(1, 99)) * 1.0) for e in sorted(ends)]


@given(exchanges(), st.sampled_from([1, 2, 4]), st.floats(0.1, 1.0))
@draws(60)
def test_an_exchange_takes_longer_in_proportion_on_slower_links(
    case: tuple[int, int, list[Message]], nics: int, bandwidth: float
) -> None:
    nodes, ranks, messages = case
    topology = simple_topology(nodes, ranks, nics).scaled(latency=0.0)
    fast = exchange(nodes * ranks, messages, topology)
    slow = exchange(nodes * ranks, messages, topology.scaled(bandwidth=bandwidth))
    assert slow.seconds == pytest.approx(fast.seconds / bandwidth)
    assert fast.seconds >= (fast.ports["moved"] / fast.ports["bandwidth"]).max() * (1 - 1e-9)
    late = exchange(nodes * ranks, messages, simple_topology(nodes, ranks, nics))
    assert fast.seconds + 1 <= late.seconds <= fast.seconds + 2


def test_a_message_waits_until_its_receiver_has_launched() -> None:
    programs = [
        [(LAUNCH, 0, 0.0)],
        [(COMPUTE, 0, 4.0), (LAUNCH, 0, 0.0), (WAIT, 0, 0.0)],
    ]
    times = run_by_hand(programs, [(0, 0, 1, 50.0)], simple_topology(1, 2))
    assert times.seconds == 4 + 1 + 5


def test_computing_hides_a_message() -> None:
    programs = [
        [(LAUNCH, 0, 0.0)],
        [(LAUNCH, 0, 0.0), (COMPUTE, 0, 4.0), (WAIT, 0, 0.5), (COMPUTE, 1, 2.0)],
    ]
    times = run_by_hand(programs, [(0, 0, 1, 50.0)], simple_topology(1, 2))
    assert times.seconds == 6 + 0.5 + 2  # arrives at 6, is unpacked for 0.5
    assert times.compute_seconds == 6
    assert times.exposed_seconds == 2.5
    assert times.rank_waiting_seconds.tolist() == [0, 2]


@pytest.mark.parametrize(("ordered", "seconds"), [(True, 1 + 10 + 1 + 1), (False, 1 + 1)])
def test_ordered_phases_travel_one_after_the_other(ordered: bool, seconds: float) -> None:
    topology = Topology(
        1, 3, Link(1.0, 10.0), Link(1.0, 10.0), ordered_phases=ordered, name="by hand"
    )
    programs = [
        [(LAUNCH, 0, 0.0), (LAUNCH, 1, 0.0)],
        [(COMPUTE, 0, 5.0), (LAUNCH, 0, 0.0), (WAIT, 0, 0.0)],
        [(LAUNCH, 1, 0.0), (WAIT, 1, 0.0)],
    ]
    times = run_by_hand(programs, [(0, 0, 1, 50.0), (1, 0, 2, 10.0)], topology)
    assert times.rank_seconds[1] == 5 + 1 + 5
    assert times.rank_seconds[2] == seconds


def unordered(nodes: int, ranks: int, nics: int = 1) -> Topology:
    return replace(simple_topology(nodes, ranks, nics), ordered_phases=False)


def test_messages_of_unordered_phases_share_a_port_evenly() -> None:
    messages = [(0, 0, 1, 50.0), (1, 0, 2, 10.0)]
    programs = [
        [(LAUNCH, 0, 0.0), (LAUNCH, 1, 0.0)],
        [(LAUNCH, 0, 0.0), (WAIT, 0, 0.0)],
        [(LAUNCH, 1, 0.0), (WAIT, 1, 0.0)],
    ]
    times = run_by_hand(programs, messages, unordered(1, 3))
    assert times.messages["arrival"].tolist() == pytest.approx([1 + 6, 1 + 2])


def test_shares_that_others_cannot_use_are_given_away() -> None:
    """Ranks 0, 1 and 3 send to rank 2, which gives each a third; rank 0 has the rest for rank 4."""
    messages = [(0, 0, 2, 20.0), (0, 1, 2, 20.0), (0, 3, 2, 20.0), (0, 0, 4, 40.0)]
    times = exchange(5, messages, unordered(1, 5))
    assert times.messages["arrival"].tolist() == pytest.approx([1 + 6, 1 + 6, 1 + 6, 1 + 6])


def test_messages_between_two_ranks_travel_one_after_the_other() -> None:
    programs = [
        [(LAUNCH, 0, 0.0), (LAUNCH, 1, 0.0)],
        [(LAUNCH, 0, 0.0), (LAUNCH, 1, 0.0), (WAIT, 1, 0.0)],
    ]
    times = run_by_hand(programs, [(0, 0, 1, 50.0), (1, 0, 1, 10.0)], unordered(1, 2))
    assert times.messages["arrival"].tolist() == [1 + 5, 1 + 6]


def test_a_sender_hears_of_its_receiver_behind_what_comes_from_there() -> None:
    """Rank 1 sends for 10 seconds, and launches the receive of phase 1 at second 3."""
    programs = [
        [(LAUNCH, 0, 0.0), (LAUNCH, 1, 0.0), (WAIT, 0, 0.0)],
        [(LAUNCH, 0, 0.0), (COMPUTE, 0, 3.0), (LAUNCH, 1, 0.0), (WAIT, 1, 0.0)],
    ]
    messages = [(0, 1, 0, 100.0), (1, 0, 1, 10.0)]
    times = run_by_hand(programs, messages, unordered(1, 2))
    assert times.messages["send"].tolist() == [0.5, 0.5 + 10 + 0.5]
    assert times.messages["arrival"].tolist() == [1 + 10, 1 + 10 + 1 + 0.5]


@given(exchanges(), st.sampled_from([1, 2, 4]))
@draws(60)
def test_ports_that_are_shared_carry_what_they_can(
    case: tuple[int, int, list[Message]], nics: int
) -> None:
    """Never more than their bandwidth, and some port that a message uses is always busy."""
    nodes, ranks, messages = case
    topology = unordered(nodes, ranks, nics).scaled(latency=0.0)
    times = exchange(nodes * ranks, messages, topology)
    moved, bandwidth = times.ports["moved"], times.ports["bandwidth"]
    busy = moved / bandwidth
    assert (times.ports["free"] >= busy * (1 - 1e-9)).all()
    arrival = times.messages["arrival"]
    for i, (_, source, target, _) in enumerate(messages):
        out_of, into = ports_of(source, target, topology)
        assert arrival[i] <= (busy[out_of] + busy[into]) * (1 + 1e-9)


def ports_of(source: int, target: int, topology: Topology) -> tuple[int, int]:
    """Outbound ports of all ranks, then inbound ones, then the same for NICs."""
    ranks, per_node, nics = topology.num_ranks, topology.ranks_per_node, topology.nics
    if source // per_node == target // per_node:
        return source, ranks + target
    out_of, into = (
        r // per_node * nics + r % per_node * nics // per_node for r in (source, target)
    )
    return 2 * ranks + out_of, 2 * ranks + topology.nodes * nics + into


@pytest.mark.parametrize("far", [True, False])
def test_what_crosses_a_border_and_what_stays_inside_do_not_wait_for_each_other(far: bool) -> None:
    """Rank 0 launches phase 0 towards a rank that is busy, then phase 1 the other way; two ranks
    per node."""
    late, early = (2, 1) if far else (1, 2)
    programs: list[list[tuple[Op, int, float]]] = [[]] * 4
    programs[0] = [(LAUNCH, 0, 0.0), (LAUNCH, 1, 0.0)]
    programs[late] = [(COMPUTE, 0, 50.0), (LAUNCH, 0, 0.0), (WAIT, 0, 0.0)]
    programs[early] = [(LAUNCH, 1, 0.0), (WAIT, 1, 0.0)]
    messages = [(0, 0, late, 20.0), (1, 0, early, 20.0)]
    times = run_by_hand(programs, messages, simple_topology(2, 2))
    inside, between = 1 + 20 / 10, 2 + 20 / 4
    assert times.rank_seconds[early] == (inside if far else between)
    assert times.rank_seconds[late] == 50 + (between if far else inside)


def test_phases_over_borders_travel_one_after_the_other_past_those_inside() -> None:
    """Phases 0 and 2 go from node to node, phase 1 stays inside."""
    programs = [
        [(LAUNCH, 0, 0.0), (LAUNCH, 1, 0.0), (LAUNCH, 2, 0.0)],
        [(LAUNCH, 1, 0.0), (WAIT, 1, 0.0)],
        [(COMPUTE, 0, 30.0), (LAUNCH, 0, 0.0), (WAIT, 0, 0.0)],
        [(LAUNCH, 2, 0.0), (WAIT, 2, 0.0)],
    ]
    messages = [(0, 0, 2, 4.0), (1, 0, 1, 10.0), (2, 0, 3, 4.0)]
    times = run_by_hand(programs, messages, simple_topology(2, 2))
    assert times.rank_seconds.tolist() == [0, 1 + 1, 30 + 2 + 1, 30 + 2 * (2 + 1)]


def test_a_slow_rank_computes_longer_in_proportion_to_its_speed() -> None:
    topology = Topology(1, 2, speeds=(1.0, 0.25))
    times = run_by_hand([[(COMPUTE, 0, 2.0)]] * 2, [], topology)
    assert times.rank_compute_seconds.tolist() == [2.0, 8.0]


def test_ranks_that_wait_for_each_other_forever_are_named() -> None:
    programs = [
        [(WAIT, 1, 0.0), (LAUNCH, 0, 0.0), (LAUNCH, 1, 0.0)],
        [(LAUNCH, 0, 0.0), (WAIT, 0, 0.0), (LAUNCH, 1, 0.0)],
    ]
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] never finish; rank 0 waits for phase 1"):
        run_by_hand(programs, [(0, 0, 1, 8.0), (1, 1, 0, 8.0)], simple_topology(1, 2))


def test_bytes_through_the_ports_are_those_of_the_messages() -> None:
    times = exchange(4, [(0, 0, 1, 50.0), (0, 0, 2, 7.0)], simple_topology(2, 2))
    out_of_rank, into_rank, out_of_nic, into_nic = np.split(times.ports["moved"], (4, 8, 10))
    assert out_of_rank.tolist() == [50, 0, 0, 0]
    assert into_rank.tolist() == [0, 50, 0, 0]
    assert out_of_nic.tolist() == [7, 0]
    assert into_nic.tolist() == [0, 7]
