"""The Mask dataclass: normal form, validation, equality, composition."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from dyncp.masks import Mask
from strategies import masks_of

LENGTHS = st.integers(1, 20)


def test_the_example_of_the_docstring_is_right():
    mask = Mask([[[0, 1], [4, 4]], [[0, 2], [4, 4]], [[1, 3], [4, 4]], [[0, 1], [2, 4]]])
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1]]
    assert mask.dense().astype(int).tolist() == expected
    assert (mask.length, mask.num_pairs) == (4, 8)


def test_touching_ranges_are_merged():
    assert Mask([[[0, 1], [1, 2]], [[0, 1], [1, 1]]]).ranges.tolist() == [[[0, 2]], [[0, 1]]]


def test_empty_ranges_come_last_as_length_length():
    mask = Mask([[[0, 0], [0, 1]], [[1, 1], [0, 1]], [[0, 1], [2, 3]]])
    assert mask.ranges.tolist() == [[[0, 1], [3, 3]], [[0, 1], [3, 3]], [[0, 1], [2, 3]]]


def test_columns_that_are_empty_for_every_token_are_dropped():
    assert Mask([[[0, 1], [1, 1], [2, 2]], [[0, 0], [0, 0], [0, 2]]]).ranges.shape == (2, 1, 2)


def test_a_mask_that_allows_nothing_keeps_one_column():
    mask = Mask(np.zeros((3, 4, 2), int))
    assert mask.ranges.tolist() == [[[3, 3]]] * 3
    assert mask.num_pairs == 0


@given(st.data(), LENGTHS)
def test_normal_form_is_unique(data, length):
    mask = data.draw(masks_of(length))
    keys = np.arange(length)
    one_per_key = np.stack(np.broadcast_arrays(keys, keys + mask.dense()), axis=2)
    np.testing.assert_array_equal(Mask(one_per_key).ranges, mask.ranges)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.uint64])
def test_any_integer_dtype_is_accepted_and_stored_as_int32(dtype):
    mask = Mask(np.array([[[0, 1]], [[0, 2]]], dtype))
    assert mask == masks.causal(2)
    assert mask.ranges.dtype == np.int32


def test_arrays_are_read_only_copies():
    given_ranges = np.array([[[0, 1]], [[0, 2]]], np.int32)
    mask = Mask(given_ranges, positions=np.array([0, 5], np.int32), targets=[-1, -1])
    given_ranges[0] = 9
    assert mask.ranges[0].tolist() == [[0, 1]]
    for array in (mask.ranges, mask.positions, mask.targets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_default_positions_and_targets_are_resolved_and_stored_as_none():
    mask = Mask([[[0, 1]]] * 3, positions=[0, 1, 2], targets=[1, 2, -1])
    assert mask.positions is None
    assert mask.targets is None
    assert mask.resolved_positions().tolist() == [0, 1, 2]
    assert mask.resolved_targets().tolist() == [1, 2, -1]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([[0, 1]], r"shape \(1, 2\); they must have shape \[tokens, R, 2\]"),
        ([[[0, 1, 2]]], r"shape \(1, 1, 3\)"),
        (np.zeros((0, 1, 2), int), r"shape \(0, 1, 2\).*at least one token"),
        (np.zeros((2, 0, 2), int), r"shape \(2, 0, 2\).*one range"),
        ([[[0.0, 1.0]]], "dtype float64; they must be integers"),
        ([[[False, True]]], "dtype bool"),
        ([[[0, 1]], [[2, 1]]], r"range 0 of token 1 is \[2, 1\).*backwards"),
        ([[[0, 1]], [[-1, 1]]], r"range 0 of token 1 is \[-1, 1\).*leaves.*inside \[0, 2\)"),
        ([[[0, 1]], [[0, 3]]], r"range 0 of token 1 is \[0, 3\).*leaves"),
        (np.array([[[0, 2**33]]]), "leaves the sequence"),
        ([[[0, 1], [0, 2]]] * 2, r"range 1 of token 0 is \[0, 2\).*overlaps"),
        ([[[1, 2], [0, 1]]] * 2, r"range 1 of token 0 is \[0, 1\).*sorted"),
        ([[[1, 2], [2, 2], [0, 1]]] * 2, r"range 2 of token 0 is \[0, 1\)"),
    ],
)
def test_bad_ranges_are_refused_with_their_place(ranges, message):
    with pytest.raises(ValueError, match=message) as error:
        Mask(ranges, name="mine")
    assert "'mine'" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": [0]}, r"positions have shape \(1,\); they must have shape \(2,\)"),
        ({"targets": [[0, 1]]}, r"targets have shape \(1, 2\); they must have shape \(2,\)"),
        ({"positions": [0.5, 1.0]}, "positions have dtype float64"),
        ({"positions": [3, -1]}, r"positions\[1\] is -1"),
        ({"positions": [3, 2**31]}, r"positions\[1\] is 2147483648"),
        ({"targets": [1, 2]}, r"targets\[1\] is 2; it must be -1 \(no target\) or 0 to 1"),
        ({"targets": [-2, 1]}, r"targets\[0\] is -2"),
    ],
)
def test_bad_positions_and_targets_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Mask([[[0, 1]], [[0, 2]]], **fields)


def rebuilt(mask: Mask) -> Mask:
    """The mask built again from its own arrays, which are in normal form."""
    marks = {"branches": mask.branches, "weights": mask.weights}
    return Mask(mask.ranges, mask.positions, mask.targets, **marks)


@given(st.data(), LENGTHS)
def test_and_allows_what_both_allow(data, length):
    left, right = data.draw(pair_of_masks(length))
    both = left & right
    np.testing.assert_array_equal(both.dense(), left.dense() & right.dense())
    assert both == rebuilt(both)


@given(st.data(), LENGTHS)
def test_or_allows_what_either_allows(data, length):
    left, right = data.draw(pair_of_masks(length))
    either = left | right
    np.testing.assert_array_equal(either.dense(), left.dense() | right.dense())
    assert either == rebuilt(either)


@given(st.data())
def test_many_ranges_per_token_compose_too(data):
    length = 80
    seed = data.draw(st.integers(0, 1000))
    dense = np.random.default_rng(seed).random((2, length, length)) < 0.5
    keys = np.arange(length)
    left, right = (Mask(np.stack(np.broadcast_arrays(keys, keys + one), axis=2)) for one in dense)
    np.testing.assert_array_equal((left & right).dense(), dense[0] & dense[1])
    np.testing.assert_array_equal((left | right).dense(), dense[0] | dense[1])


def pair_of_masks(length):
    """Two masks, of which only the first may set positions and targets. The second has no name,
    because sliding_window is refused over some masks."""
    plain = masks_of(length).map(lambda mask: Mask(mask.ranges))
    return st.tuples(masks_of(length), plain)


def test_masks_of_different_lengths_do_not_compose():
    with pytest.raises(ValueError, match=r"'causal' has 4 tokens and 'full' has 5"):
        masks.causal(4) & masks.full(5)


def test_a_mask_composes_with_masks_only():
    with pytest.raises(TypeError):
        masks.causal(4) & 3


def test_positions_and_targets_of_one_side_are_kept():
    packed = masks.document_packed(5, documents=[2, 3])
    for mask in (packed & masks.causal(5), masks.causal(5) | packed, packed & packed):
        assert mask.resolved_positions().tolist() == [0, 1, 0, 1, 2]
        assert mask.resolved_targets().tolist() == [1, -1, 3, 4, -1]


def test_different_positions_on_both_sides_are_refused():
    with pytest.raises(ValueError, match="disagree about positions: token 2 has 0 in one and 2"):
        masks.document_packed(5, documents=[2, 3]) & masks.document_packed(5, documents=[3, 2])


def test_different_targets_on_both_sides_are_refused():
    ranges = masks.causal(3).ranges
    with pytest.raises(ValueError, match="disagree about targets: token 1"):
        Mask(ranges, targets=[1, -1, -1]) | Mask(ranges, targets=[1, 0, -1])


def test_a_composed_mask_says_what_it_is_made_of():
    a, b, c = masks.causal(4), masks.full(4), masks.sliding_window(4)
    assert ((a | b) & c).name == "(causal | full) & sliding_window"


def test_equality_and_digest_go_by_content_and_not_by_name():
    mask = Mask(masks.causal(5).ranges, name="other")
    assert mask == masks.causal(5)
    assert hash(mask) == hash(masks.causal(5))
    assert mask.digest == masks.causal(5).digest
    assert len(mask.digest) == 16
    assert mask != "causal"


def test_digest_tells_apart_length_ranges_positions_and_targets():
    ranges = masks.causal(3).ranges
    different = [
        Mask(ranges),
        masks.causal(4),
        masks.full(3),
        Mask(ranges, positions=[0, 1, 1]),
        Mask(ranges, targets=[0, 1, 1]),
        Mask(ranges, positions=[0, 1, 1], targets=[0, 1, 1]),
    ]
    assert len({mask.digest for mask in different}) == len(different)
    assert len(set(different)) == len(different)


@given(st.data(), LENGTHS)
def test_a_mask_survives_pickling(data, length):
    mask = data.draw(masks_of(length))
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert again.name == mask.name
    assert not again.ranges.flags.writeable


def test_a_mask_cannot_be_changed():
    with pytest.raises(AttributeError):
        masks.causal(3).name = "other"


def test_repr_is_short():
    assert repr(masks.causal(4)) == "<Mask causal: 4 tokens, 10 pairs>"
