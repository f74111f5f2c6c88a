"""Text drawings."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from strategies import masks_of


def test_a_small_mask_is_drawn_token_by_token():
    assert masks.sliding_window(4, window=2).draw().splitlines() == [
        "sliding_window: 4 tokens, 7 pairs, density 43.8 %",
        "█···",
        "██··",
        "·██·",
        "··██",
    ]


def test_a_large_mask_is_drawn_in_shades():
    # Cells of 4 tokens: 10 of 16 pairs on the diagonal, 6 of 16 at the far end of the window.
    assert masks.sliding_window(16, window=4).draw(width=4).splitlines()[1:] == [
        "▒···",
        "░▒··",
        "·░▒·",
        "··░▒",
    ]


@given(st.data(), st.integers(1, 50), st.integers(1, 60))
def test_a_drawing_is_square_and_fits_the_width(data, length, width):
    caption, *rows = data.draw(masks_of(length)).draw(width).splitlines()
    assert f"{length} tokens" in caption
    assert len(rows) <= width
    assert {len(row) for row in rows} == {len(rows)}


def test_a_width_of_zero_is_refused():
    with pytest.raises(ValueError, match="width is 0; allowed is at least 1"):
        masks.causal(4).draw(0)


@pytest.mark.parametrize(
    ("mask", "function"),
    [
        (masks.causal(4), masks.causal),
        (masks.sliding_window(5, window=2), masks.sliding_window),
        (masks.lambda_shaped(6, sinks=1, window=2), masks.lambda_shaped),
        (masks.causal_blockwise(8, block=2, local=1, sink=1), masks.causal_blockwise),
        (masks.shared_question(6, answers=2, question=2), masks.shared_question),
        (masks.prefix_lm(5, prefix=3), masks.prefix_lm),
        (masks.document_packed(5, documents=[2, 3]), masks.document_packed),
        (masks.global_sliding(6, num_global=1, window=2, causal=False), masks.global_sliding),
        (masks.block_causal(5, chunk=2), masks.block_causal),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_drawing_in_a_docstring_is_the_mask(mask, function):
    lines = inspect.getdoc(function).splitlines()
    drawn = [line.split()[0] for line in lines if line[:1] in ("█", "·")]
    assert drawn == mask.draw().splitlines()[1:]


def test_the_drawings_of_the_documentation_are_the_masks():
    page = Path(__file__).parents[2] / "docs" / "masks.md"
    bands = page.read_text(encoding="utf-8").split("```")[3].strip().split("\n\n")
    columns = [
        column for band in bands for column in zip(*map(str.split, band.splitlines()), strict=True)
    ]
    expected = {
        "causal": {},
        "full": {},
        "sliding_window": {"window": 3},
        "lambda_shaped": {"sinks": 1, "window": 3},
        "causal_blockwise": {"block": 2, "local": 1},
        "shared_question": {"answers": 2, "question": 2},
        "prefix_lm": {"prefix": 3},
        "document_packed": {"documents": [3, 5]},
        "global_sliding": {"num_global": 1, "window": 2, "causal": False},
        "block_causal": {"chunk": 3},
    }
    drawn_elsewhere = {"prefix_tree"}  # with positions and targets
    assert {name for name, *_ in columns} == set(expected) == {*masks.BUILTIN} - drawn_elsewhere
    for name, *rows in columns:
        assert rows == masks.BUILTIN[name](8, **expected[name]).draw().splitlines()[1:], name
