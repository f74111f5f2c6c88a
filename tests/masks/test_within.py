"""Windows and chunks by position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from sizes import draws


def by_definition(mask, window=None, chunk=None):
    position = mask.resolved_positions().astype(int)
    query, key = position[:, None], position[None, :]
    if window is not None:
        return mask.dense() & (key > query - window) & (key <= query)
    return mask.dense() & (key // chunk == query // chunk)


BASES = {
    "causal": masks.causal,
    "shared_question": lambda n: masks.shared_question(n, answers=3),
    "document_packed": lambda n: masks.document_packed(n, documents=[n // 3, n - n // 3]),
    "lambda_shaped": lambda n: masks.lambda_shaped(n, sinks=2, window=3),
    "any positions": lambda n: masks.Mask(
        masks.causal(n).ranges, positions=np.random.default_rng(n).integers(0, 4, n)
    ),
}


@pytest.mark.parametrize("base", BASES)
@draws(30)
@given(
    length=st.integers(1, 40), size=st.integers(1, 12), kind=st.sampled_from(["window", "chunk"])
)
def test_it_keeps_the_pairs_that_are_near_by_position(base, length, size, kind):
    mask = BASES[base](length)
    near = masks.within(mask, **{kind: size})
    assert (near.dense() == by_definition(mask, **{kind: size})).all()
    assert near == masks.Mask(near.ranges, near.positions, near.targets)  # in normal form
    assert (near.resolved_positions() == mask.resolved_positions()).all()
    assert (near.resolved_targets() == mask.resolved_targets()).all()


def test_a_window_in_plain_text_is_the_sliding_window():
    near = masks.within(masks.causal, window=7)
    assert near(50) == masks.sliding_window(50, window=7)
    assert near({"input_ids": [0] * 9}).length == 9
    assert repr(near) == "masks.within(masks.causal, window=7)"


def test_a_window_of_rows_over_branches_is_refused():
    with pytest.raises(ValueError, match=r"use masks.within\(masks.shared_question, window=...\)"):
        (masks.shared_question & masks.sliding_window(window=8))(40)
    with pytest.raises(ValueError, match="counts rows"):
        masks.sliding_window(40, window=8) & masks.shared_question(40)
    packed = masks.document_packed(40, documents=[10, 30])
    assert packed & masks.sliding_window(40, window=8) == masks.within(packed, window=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give one of them"),
        ({"window": 3, "chunk": 4}, "give one of them"),
        ({"window": 0}, "window is 0; at least 1 is needed"),
    ],
)
def test_what_is_not_a_size_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        masks.within(masks.causal, **arguments)
    with pytest.raises(ValueError, match=r"the mask of masks\.within is str"):
        masks.within("causal", window=3)


def test_windows_are_read_off_masks_and_functions():
    assert masks.window_of(masks.sliding_window(20, window=6)) == 6
    assert masks.window_of(masks.lambda_shaped(20, sinks=2, window=5)) == 5
    assert masks.window_of(masks.global_sliding(20, num_global=1, window=4, causal=False)) == 4
    assert masks.window_of(masks.sliding_window(6, window=6)) is None  # too short to show it
    packed = masks.document_packed(21, documents=[7, 7, 7])
    for other in (masks.causal(20), masks.full(20), packed, masks.block_causal(20, chunk=4)):
        assert masks.window_of(other) is None
    assert list(masks.windows_of(masks.sliding_window(window=6))) == [6]
    both = masks.document_packed & (masks.sliding_window(window=6) | masks.lambda_shaped(window=9))
    assert list(masks.windows_of(both)) == [6, 9]
    assert list(masks.windows_of(masks.within(masks.causal, window=5))) == [5]
    assert list(masks.windows_of(masks.causal)) == []
    assert list(masks.windows_of(len)) == []
