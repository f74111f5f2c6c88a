"""Tokens that see what they predict, directly or through another token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from dyncp.masks import sees_target
from sizes import draws


def random_mask(dense):
    """The mask with these pairs."""
    return masks.from_mask_mod(lambda _b, _h, q, k: torch.from_numpy(dense)[q, k], len(dense))


@draws(60)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 14), number=st.integers(1, 2))
def test_a_token_sees_what_it_or_a_key_of_it_attends(seed, length, number):
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(number):
        dense = rng.random((length, length)) < rng.choice([0.05, 0.2, 0.5])
        chosen.append(random_mask(np.tril(dense) if rng.random() < 0.5 else dense))
    token, target = rng.integers(0, length, (2, 3 * length))
    either = np.any([mask.dense() for mask in chosen], axis=0)
    expected = either | ((either.astype(int) @ either) > 0)
    assert (sees_target(chosen, token, target) == expected[token, target]).all()


CAUSAL = ["causal", "sliding_window", "lambda_shaped", "causal_blockwise", "shared_question"]


@pytest.mark.parametrize("name", [*CAUSAL, "prefix_tree", "document_packed"])
def test_causal_masks_show_no_token_its_target(name):
    parameters = {
        "prefix_tree": {"parents": [-1, 0, 0], "lengths": [4, 5, 3]},
        "document_packed": {"documents": [9, 3]},
    }
    mask = masks.by_name(name)(12, **parameters.get(name, {}))
    targets = mask.resolved_targets()
    token = np.flatnonzero(targets >= 0)
    assert len(token)
    assert not sees_target([mask], token, targets[token]).any()


def seen_by(mask):
    targets = mask.resolved_targets()
    token = np.flatnonzero(targets >= 0)
    return token[sees_target([mask], token, targets[token].astype(np.int64))].tolist()


def test_tokens_that_attend_what_follows_see_it():
    assert seen_by(masks.full(5)) == [0, 1, 2, 3]
    assert seen_by(masks.prefix_lm(6, prefix=3)) == [0, 1]
    assert seen_by(masks.block_causal(6, chunk=3)) == [0, 1, 3, 4]
    assert seen_by(masks.document_packed(5, documents=[3, 2], causal=False)) == [0, 1, 3]
    assert seen_by(masks.global_sliding(5, num_global=0, window=2, causal=False)) == [0, 1, 2, 3]
    assert seen_by(masks.causal(6) | masks.prefix_lm(6, prefix=2)) == [0]


def test_a_global_token_that_attends_everything_shows_it_to_all():
    summary = masks.from_mask_mod(lambda _b, _h, q, k: (q >= k) | (q == 0), 6)
    assert seen_by(summary) == [0, 1, 2, 3, 4]


def test_masks_of_different_layers_are_seen_together():
    prefix, causal = masks.prefix_lm(6, prefix=3), masks.causal(6)
    token, target = np.arange(5), np.arange(1, 6)
    assert sees_target([causal, prefix], token, target).tolist() == [True] * 2 + [False] * 3


def test_own_labels_are_predicted_in_their_place():
    mask = masks.own_labels(masks.full)(4)
    assert mask.resolved_targets().tolist() == [0, 1, 2, 3]
    assert mask.num_pairs == 16
    tree = masks.own_labels(masks.prefix_tree(parents=[-1, 0, 0], lengths=[2, 1, 1]))(4)
    assert tree.branches is None
    assert tree.resolved_positions().tolist() == [0, 1, 2, 2]
    with pytest.raises(ValueError, match=r"the mask of masks\.own_labels is int"):
        masks.own_labels(3)
