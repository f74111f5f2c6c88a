"""FlexAttention-style functions as masks."""

# ruff: noqa: ARG005 (every mask_mod has four arguments)

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from strategies import masks_of


@pytest.fixture
def no_torch(monkeypatch):
    """As in a process that has not imported torch."""
    monkeypatch.delitem(sys.modules, "torch")


def causal_mod(b, h, q, k):
    return q >= k


@given(st.data(), st.integers(1, 20))
def test_a_torch_mask_mod_gives_the_same_ranges(data, length):
    mask = data.draw(masks_of(length))
    dense = torch.from_numpy(mask.dense())
    again = masks.from_mask_mod(lambda b, h, q, k: dense[q, k], length)
    np.testing.assert_array_equal(again.ranges, mask.ranges)


def test_a_numpy_mask_mod_gives_the_same_ranges(no_torch):
    dense = masks.lambda_shaped(30, sinks=2, window=4).dense()

    def mod(b, h, q, k):
        assert isinstance(q, np.ndarray)
        return dense[q, k]

    assert masks.from_mask_mod(mod, 30) == masks.lambda_shaped(30, sinks=2, window=4)


def test_torch_operations_work_when_torch_is_imported():
    documents = torch.tensor([0, 0, 1, 1, 1])

    def mod(b, h, q, k):
        return torch.logical_and(documents[q] == documents[k], q >= k)

    expected = masks.document_packed(5, documents=[2, 3])
    np.testing.assert_array_equal(masks.from_mask_mod(mod, 5).ranges, expected.ranges)


def test_long_masks_are_evaluated_in_chunks_of_rows(monkeypatch):
    monkeypatch.setattr(sys.modules["dyncp.masks.function"], "CHUNK_PAIRS", 70)
    seen = []

    def mod(b, h, q, k):
        seen.append((tuple(q.shape), tuple(k.shape)))
        return (q >= k) & ((k < 1) | (q - k < 3))

    assert masks.from_mask_mod(mod, 23) == masks.lambda_shaped(23, sinks=1, window=3)
    assert seen == [((3, 1), (1, 23))] * 7 + [((2, 1), (1, 23))]


def test_a_constant_is_broadcast_and_the_batch_index_is_zero():
    assert masks.from_mask_mod(lambda b, h, q, k: True, 5) == masks.full(5)
    assert masks.from_mask_mod(lambda b, h, q, k: b == 0, 5) == masks.full(5)
    assert masks.from_mask_mod(lambda b, h, q, k: k < 2, 5).num_pairs == 10
    assert masks.from_mask_mod(lambda b, h, q, k: False, 5).num_pairs == 0


def test_without_a_length_it_is_a_mask_function():
    function = masks.from_mask_mod(causal_mod)
    assert function({"input_ids": [1, 2, 3]}) == masks.causal(3)
    assert (function & masks.sliding_window(window=2))(6) == masks.sliding_window(6, window=2)
    assert pickle.loads(pickle.dumps(function))(4) == masks.causal(4)


def test_the_name_is_that_of_the_function_unless_given():
    assert masks.from_mask_mod(causal_mod, 3).name == "causal_mod"
    assert masks.from_mask_mod(causal_mod, 3, name="mine").name == "mine"


HEAD_USES = {
    "compared": lambda b, h, q, k: h == 0,
    "compared on the right": lambda b, h, q, k: q >= h,
    "added": lambda b, h, q, k: q + h >= k,
    "added to": lambda b, h, q, k: h + q >= k,
    "torch function": lambda b, h, q, k: torch.where(torch.ge(q, h), q, k) > 0,
    "index of a tensor": lambda b, h, q, k: torch.ones(4)[h] > q,
    "part of an index": lambda b, h, q, k: torch.ones(4, 9)[h, q] > k,
    "index of an array": lambda b, h, q, k: np.ones(4)[h] > 0,
    "index of a list": lambda b, h, q, k: [True, False][h],
    "key of a dict": lambda b, h, q, k: {0: True}[h],
    "truth value": lambda b, h, q, k: True if h else q >= k,
    "modulo": lambda b, h, q, k: h % 2 == 0,
    "power": lambda b, h, q, k: 2**-h < q,
    "attribute": lambda b, h, q, k: h.item() == 0,
    "numpy function": lambda b, h, q, k: np.less(h, 3),
}


NEED_TORCH = ("torch function", "index of a tensor", "part of an index")


@pytest.mark.parametrize("use", HEAD_USES, ids=str)
def test_any_use_of_the_head_index_is_refused(use):
    with pytest.raises(ValueError, match="same for all heads"):
        masks.from_mask_mod(HEAD_USES[use], 4)


@pytest.mark.parametrize("use", [use for use in HEAD_USES if use not in NEED_TORCH], ids=str)
def test_any_use_of_the_head_index_is_refused_without_torch(no_torch, use):
    with pytest.raises(ValueError, match="same for all heads"):
        masks.from_mask_mod(HEAD_USES[use], 4)


@pytest.mark.parametrize(
    ("mod", "message"),
    [
        (lambda b, h, q, k: q - k, "returned int64; it must return a boolean"),
        (lambda b, h, q, k: torch.ones(3, dtype=bool), r"returned shape \(3,\) for q \(5, 1\)"),
    ],
)
def test_results_that_are_not_a_mask_are_refused(mod, message):
    with pytest.raises(ValueError, match=message):
        masks.from_mask_mod(mod, 5)
