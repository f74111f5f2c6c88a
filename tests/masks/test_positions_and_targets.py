"""Positions and next-token targets of branching and packed masks, compared with lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from strategies import parameters_of


def layout(mask):
    return mask.resolved_positions().tolist(), mask.resolved_targets().tolist()


def test_answers_continue_the_question_and_end_without_target():
    positions, targets = layout(masks.shared_question(8, answers=2, question=2))
    assert positions == [0, 1, 2, 3, 4, 2, 3, 4]
    assert targets == [1, -1, 3, 4, -1, 6, 7, -1]


def test_the_last_answer_takes_the_remainder():
    positions, targets = layout(masks.shared_question(7, answers=3, question=1))
    assert positions == [0, 1, 2, 1, 2, 1, 2]
    assert targets == [-1, 2, -1, 4, -1, 6, -1]
    positions, targets = layout(masks.shared_question(7, answers=3, question=0))
    assert positions == [0, 1, 0, 1, 0, 1, 2]
    assert targets == [1, -1, 3, -1, 5, 6, -1]


def test_with_one_answer_the_question_predicts_its_first_token():
    mask = masks.shared_question(5, answers=1, question=2)
    assert mask == masks.causal(5)
    assert layout(mask) == ([0, 1, 2, 3, 4], [1, 2, 3, 4, -1])


def test_answers_without_tokens_do_not_count():
    mask = masks.shared_question(3, answers=4, question=1)  # 0, 0, 0 and 2 tokens
    assert layout(mask) == ([0, 1, 2], [1, 2, -1])


def test_a_question_without_answers_has_no_target_at_its_end():
    assert layout(masks.shared_question(3, question=3)) == ([0, 1, 2], [1, 2, -1])


def test_answers_may_have_their_own_lengths():
    mask = masks.shared_question(7, answers=[1, 3])
    assert layout(mask) == ([0, 1, 2, 3, 3, 4, 5], [1, 2, -1, -1, 5, 6, -1])
    assert mask.ranges[6].tolist() == [[0, 3], [4, 7]]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_very_short_shared_questions_are_valid(length):
    mask = masks.shared_question(length)
    assert mask.length == length
    assert mask.dense().diagonal().all()


def test_documents_restart_positions_and_end_without_target():
    positions, targets = layout(masks.document_packed(6, documents=[1, 3, 2]))
    assert positions == [0, 0, 1, 2, 0, 1]
    assert targets == [-1, 2, 3, -1, 5, -1]


def test_empty_documents_are_skipped():
    packed = masks.document_packed(5, documents=[0, 2, 0, 3, 0])
    assert packed == masks.document_packed(5, documents=[2, 3])


def test_one_document_is_just_causal():
    assert masks.document_packed(5, documents=[5]) == masks.causal(5)


@given(st.data(), st.integers(1, 20), st.sampled_from(["shared_question", "document_packed"]))
def test_a_target_is_a_token_that_sees_its_source_one_position_later(data, length, name):
    mask = masks.BUILTIN[name](length, **data.draw(parameters_of(name, length)))
    positions, targets = layout(mask)
    allowed = mask.dense()
    for token, target in enumerate(targets):
        if target >= 0:
            assert positions[target] == positions[token] + 1
            assert allowed[target, token]
