"""`masks.prefix_tree`: every path from a root to a leaf is a separate text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from dyncp.masks import Mask


@st.composite
def trees(draw):
    nodes = draw(st.integers(1, 8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(nodes)]
    return parents, [draw(st.integers(1, 4)) for _ in range(nodes)]


def path_of(node, parents):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def tokens_of(path, lengths):
    ends = np.cumsum(lengths)
    return np.concatenate([np.arange(ends[node] - lengths[node], ends[node]) for node in path])


@given(trees())
def test_every_path_is_causal_and_sees_nothing_else(tree):
    parents, lengths = tree
    mask = masks.prefix_tree(parents, lengths)
    expected = np.zeros((mask.length, mask.length), bool)
    positions = np.zeros(mask.length, int)
    for node in range(len(parents)):
        tokens = tokens_of(path_of(node, parents), lengths)
        expected[np.ix_(tokens, tokens)] |= np.tri(len(tokens), dtype=bool)
        positions[tokens] = np.arange(len(tokens))
    assert np.array_equal(mask.dense(), expected)
    assert np.array_equal(mask.resolved_positions(), positions)


@given(trees(), st.sampled_from(["token", "leaf"]))
def test_every_token_but_the_first_is_predicted_once_by_the_one_before(tree, weights):
    parents, lengths = tree
    mask = masks.prefix_tree(parents, lengths, weights=weights)
    targets = mask.resolved_targets()
    pairs = [(token, target) for token, target in enumerate(targets) if target >= 0]
    pairs += [] if mask.branches is None else list(map(tuple, mask.branches.tolist()))
    leaves = [node for node in range(len(parents)) if node not in parents]
    counted = {}
    for leaf in leaves:
        tokens = tokens_of(path_of(leaf, parents), lengths)
        for pair in zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True):
            counted[pair] = counted.get(pair, 0) + 1
    assert sorted(pairs) == sorted(counted)
    weight = np.ones(mask.length, int) if mask.weights is None else mask.weights
    if weights == "leaf":
        assert all(weight[target] == number for (_, target), number in counted.items())
    else:
        assert (weight == 1).all()


def test_it_is_in_normal_form_and_equal_to_one_made_by_hand():
    mask = masks.prefix_tree([-1, 0, 1, 1, 0], [2, 1, 1, 1, 1])
    same = Mask(mask.ranges, *mask.marks[:2], "by hand", *mask.marks[2:])
    assert same == mask
    assert same.digest == mask.digest
    assert np.array_equal(same.ranges, mask.ranges)
    assert mask != masks.prefix_tree([-1, 0, 1, 1, 0], [2, 1, 1, 1, 1], weights="leaf")


def test_samples_lengths_and_names_give_the_same_mask():
    sample = {"input_ids": np.zeros(6), "parents": [-1, 0, 0], "node_lengths": [2, 2, 2]}
    expected = masks.prefix_tree([-1, 0, 0], [2, 2, 2])
    assert masks.prefix_tree(sample) == expected
    assert masks.prefix_tree(6, parents=[-1, 0, 0], lengths=[2, 2, 2]) == expected
    assert masks.prefix_tree([-1, 0, 0], lengths=[2, 2, 2]) == expected
    assert masks.by_name("prefix_tree:parents=-1+0+0,lengths=2+2+2")(6) == expected


@pytest.mark.parametrize(
    ("parents", "lengths", "message"),
    [
        ([-1, 1], [2, 2], r"parents\[1\] is 1; a parent comes before its children"),
        ([-1, -2], [2, 2], r"parents\[1\] is -2"),
        ([-1, 0], [2], "for 1 nodes"),
        ([-1, 0], [2, 0], r"lengths\[1\] is 0; every node needs at least one token"),
        ([-1, 0.5], [2, 2], "as many integers as lengths"),
    ],
)
def test_invalid_trees_are_refused(parents, lengths, message):
    with pytest.raises(ValueError, match=message):
        masks.prefix_tree(parents, lengths)


def test_another_length_or_weighting_is_refused():
    with pytest.raises(ValueError, match="add up to 4 tokens; the sequence has 5"):
        masks.prefix_tree(5, parents=[-1, 0], lengths=[2, 2])
    with pytest.raises(ValueError, match="choose token or leaf"):
        masks.prefix_tree([-1], [2], weights="node")


@pytest.mark.parametrize(
    ("targets", "branches", "message"),
    [
        ([1, 2, -1], [[0, 1], [0, 2]], "have -1 in targets"),
        ([-1, 2, -1], [[0, 1], [0, 3]], "values 0 to 3.*the 3 tokens"),
        ([-1, 2, -1], [[0, 1], [0, 1]], "targets there once"),
        ([-1, 2, -1], [0, 1], r"shape \[n, 2\]"),
    ],
)
def test_branches_that_contradict_targets_are_refused(targets, branches, message):
    with pytest.raises(ValueError, match=message):
        Mask(masks.causal(3).ranges, None, targets, "some", branches)
