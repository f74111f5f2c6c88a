"""Topologies: nodes, links, presets, and mistakes."""

from dataclasses import replace

import pytest

from dyncp.topology import PRESETS, Link, Topology, preset


def test_ranks_fill_node_after_node() -> None:
    topology = Topology(2, 3)
    assert topology.num_ranks == 6
    assert [topology.node_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="rank is 6; allowed are 0 to 5"):
        topology.node_of(6)


@pytest.mark.parametrize("field", ["nodes", "ranks_per_node", "nics"])
def test_nothing_can_be_zero(field: str) -> None:
    with pytest.raises(ValueError, match=f"Topology.{field} is 0; at least 1 is needed"):
        Topology(**{field: 0})


def test_every_rank_needs_a_speed_above_zero() -> None:
    assert Topology(1, 3).rank_speeds.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="speeds has 2 entries for 3 ranks"):
        Topology(1, 3, speeds=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"speeds holds 0\.0; speeds must be finite and above 0"):
        Topology(1, 2, speeds=(1.0, 0.0))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_links_need_sensible_numbers(value: float) -> None:
    with pytest.raises(ValueError, match=r"Link.latency is .*; it must be finite and at least 0"):
        Link(value, 1.0)
    with pytest.raises(ValueError, match=r"Link.bandwidth is .*; it must be finite and above 0"):
        Link(0.0, value)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_take_any_number_of_nodes_and_ranks(name: str) -> None:
    assert preset(name).num_ranks == PRESETS[name].ranks_per_node
    topology = preset(name, nodes=3, ranks_per_node=2)
    assert (topology.num_ranks, topology.name) == (6, name)
    assert topology.intra == PRESETS[name].intra


def test_an_unknown_preset_names_the_choices() -> None:
    with pytest.raises(ValueError, match="'p5'; choose one of p4de, h100, h200, gb200"):
        preset("p5")


def test_a_bare_topology_has_the_links_of_p4de() -> None:
    assert replace(Topology(1, 8), name="p4de") == preset("p4de")
    assert preset("p4de").nic_bandwidth == pytest.approx(0.9 * 100e9 / 8)
    assert preset("h200").nic_bandwidth == pytest.approx(0.9 * 400e9 / 8)


def test_scaling_changes_all_links_and_nothing_else() -> None:
    topology = preset("p4de", 2)
    scaled = topology.scaled(bandwidth=0.5, latency=4.0)
    assert scaled.inter == Link(topology.inter.latency * 4, topology.inter.bandwidth / 2)
    assert scaled.intra == Link(topology.intra.latency * 4, topology.intra.bandwidth / 2)
    assert replace(scaled, intra=topology.intra, inter=topology.inter) == topology


def test_jitter_slows_ranks_down_by_at_most_the_spread() -> None:
    topology = preset("p4de", 2)
    jittered = topology.jittered(0.2, seed=1)
    assert jittered == topology.jittered(0.2, seed=1)
    assert all(0.8 <= speed <= 1 for speed in jittered.speeds)
    assert len(set(jittered.speeds)) == 16
    with pytest.raises(ValueError, match=r"spread is 1\.0; it must be at least 0 and below 1"):
        topology.jittered(1.0, seed=0)
