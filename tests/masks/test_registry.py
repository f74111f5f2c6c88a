"""Mask functions written as text."""

from __future__ import annotations

import pytest

from dyncp import masks


@pytest.mark.parametrize("name", sorted(masks.BUILTIN))
def test_every_builtin_mask_is_found_by_its_name(name):
    assert masks.by_name(name) is getattr(masks, name)


def test_aliases_are_the_same_functions():
    assert masks.by_name("document") is masks.document is masks.document_packed
    assert masks.by_name("shared_prefix") is masks.shared_prefix is masks.shared_question
    assert masks.by_name("streaming_llm") is masks.streaming_llm is masks.lambda_shaped


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sliding_window:window=512", "masks.sliding_window(window=512)"),
        (" lambda_shaped : sinks=4, window=32", "masks.lambda_shaped(sinks=4, window=32)"),
        ("document:documents=3+5", "masks.document_packed(documents=[3, 5])"),
        ("global_sliding:causal=False", "masks.global_sliding(causal=False)"),
    ],
)
def test_parameters_follow_a_colon(text, expected):
    assert repr(masks.by_name(text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("casual", "no mask 'casual'; choices: block_causal, causal, .*streaming_llm"),
        ("", "no mask ''; choices"),
        ("sliding_window:", "'' is not key=value"),
        ("sliding_window:512", "'512' is not key=value"),
        ("sliding_window:window=", "'window=' is not key=value"),
        ("sliding_window:window=1,window=2", "window is given twice"),
        ("sliding_window:window=wide", "window is 'wide'; it must be an integer"),
        ("sliding_window:size=3", "no parameter size; allowed: window"),
    ],
)
def test_bad_texts_are_refused_with_the_choices(text, message):
    with pytest.raises(ValueError, match=message):
        masks.by_name(text)
