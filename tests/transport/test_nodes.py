"""All ranks derive the same nodes from the words of all ranks."""

import pytest

from dyncp.transport.distributed import host_id, read_nodes, settings_word


def test_ranks_are_on_one_node_where_they_run_on_the_same_host():
    hosts = ["b", "b", "a", "b", "c", "a"]
    assert read_nodes([settings_word(None, 128, host) for host in hosts]) == (0, 0, 1, 0, 2, 1)
    assert read_nodes([settings_word(None, 128, host_id())] * 3) == (0, 0, 0)


def test_ranks_per_node_goes_before_hosts():
    words = [settings_word(2, 128, host) for host in "aaaaaa"]
    assert read_nodes(words) == (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(("given", "shown"), [((4, 128), "=4"), ((None, 64), "=None")])
def test_ranks_with_other_settings_are_named(given, shown):
    words = [settings_word(2, 128, "a"), settings_word(2, 128, "a"), settings_word(*given, "a")]
    with pytest.raises(ValueError, match="they must be equal on all ranks") as caught:
        read_nodes(words)
    assert f"rank 2 has ranks_per_node{shown}" in str(caught.value)
    assert "rank 0 has ranks_per_node=2, grouped_operations=128" in str(caught.value)
