"""Every named mask against its definition, written as a predicate on one pair."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from strategies import parameters_of


def causal_pair(i, j, length):
    return j <= i


def full_pair(i, j, length):
    return True


def sliding_window_pair(i, j, length, window):
    return j <= i and i - j < window


def lambda_shaped_pair(i, j, length, sinks, window):
    return j <= i and (j < sinks or i - j < window)


def causal_blockwise_pair(i, j, length, block, local, sink):
    in_last_block = i // block == (length - 1) // block
    return j <= i and (in_last_block or j < sink * block or i - j <= local * block)


def shared_question_pair(i, j, length, answers, question):
    question = length // 5 if question is None else question
    size = (length - question) // answers

    def answer_of(token):
        if token < question:
            return None
        return answers - 1 if size == 0 else min((token - question) // size, answers - 1)

    return j <= i and (j < question or answer_of(i) == answer_of(j))


def prefix_lm_pair(i, j, length, prefix):
    return j <= i or j < prefix


def document_packed_pair(i, j, length, documents, causal):
    document_of = [number for number, size in enumerate(documents) for _ in range(size)]
    return document_of[i] == document_of[j] and (j <= i or not causal)


def global_sliding_pair(i, j, length, num_global, window, causal):
    allowed = i < num_global or j < num_global or abs(i - j) < window
    return allowed and (j <= i or not causal)


def block_causal_pair(i, j, length, chunk):
    return j // chunk <= i // chunk


def prefix_tree_pair(i, j, length, parents, lengths):
    node_of = [node for node, size in enumerate(lengths) for _ in range(size)]
    above = node_of[i]
    while above >= 0 and above != node_of[j]:
        above = parents[above]
    return j <= i and above == node_of[j]


DEFINITIONS = {
    "causal": causal_pair,
    "full": full_pair,
    "sliding_window": sliding_window_pair,
    "lambda_shaped": lambda_shaped_pair,
    "causal_blockwise": causal_blockwise_pair,
    "shared_question": shared_question_pair,
    "prefix_lm": prefix_lm_pair,
    "document_packed": document_packed_pair,
    "global_sliding": global_sliding_pair,
    "block_causal": block_causal_pair,
    "prefix_tree": prefix_tree_pair,
}


def brute_force(name, length, parameters):
    return np.array(
        [
            [DEFINITIONS[name](i, j, length, **parameters) for j in range(length)]
            for i in range(length)
        ]
    )


def test_every_builtin_mask_has_a_definition_here():
    assert set(DEFINITIONS) == set(masks.BUILTIN)


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
@given(data=st.data(), length=st.integers(1, 24))
def test_a_builtin_mask_allows_exactly_the_pairs_of_its_definition(name, data, length):
    parameters = data.draw(parameters_of(name, length))
    mask = masks.BUILTIN[name](length, **parameters)
    np.testing.assert_array_equal(mask.dense(), brute_force(name, length, parameters))


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
@given(data=st.data(), length=st.integers(1, 24))
def test_a_builtin_mask_is_in_normal_form(name, data, length):
    mask = masks.BUILTIN[name](length, **data.draw(parameters_of(name, length)))
    again = masks.Mask(mask.ranges, **mask.marks._asdict())
    np.testing.assert_array_equal(again.ranges, mask.ranges)
    assert again == mask
    assert again.digest == mask.digest
    assert mask.ranges.dtype == np.int32
    assert not mask.ranges.flags.writeable


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 512, 513, 1100])
def test_causal_blockwise_follows_the_published_formula_by_default(length):
    ranges = masks.causal_blockwise(length).ranges
    for i in range(length):
        if i < 256 or i >= (length - 1) // 256 * 256 or i - 512 <= 256:
            expected = [[0, i + 1]]
        else:
            expected = [[0, 256], [i - 512, i + 1]]
        filled = [pair for pair in ranges[i].tolist() if pair[0] < pair[1]]
        assert filled == expected, i


def test_default_parameters_are_those_of_the_papers():
    assert masks.lambda_shaped(6000).ranges[5999].tolist() == [[0, 64], [5999 - 4095, 6000]]
    assert masks.sliding_window(6000).ranges[5999].tolist() == [[5999 - 4095, 6000]]
    assert masks.shared_question(1000).ranges[999].tolist() == [[0, 200], [800, 1000]]


def test_parameters_far_beyond_the_sequence_do_not_overflow():
    huge = 2**40
    assert masks.sliding_window(5, window=huge) == masks.causal(5)
    assert masks.lambda_shaped(5, sinks=huge, window=huge) == masks.causal(5)
    assert masks.causal_blockwise(5, block=huge, local=huge, sink=huge) == masks.causal(5)
    assert masks.block_causal(5, chunk=huge) == masks.full(5)
    assert masks.global_sliding(5, num_global=huge, causal=False) == masks.full(5)


def test_a_causal_global_sliding_mask_is_lambda_shaped():
    assert masks.global_sliding(40, num_global=3, window=7) == masks.lambda_shaped(
        40, sinks=3, window=7
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: masks.sliding_window(8, window=0), "sliding_window: window is 0; .*at least 1"),
        (lambda: masks.sliding_window(8, window=2.5), "window is 2.5; expected an integer"),
        (lambda: masks.sliding_window(8, window=True), "window is True; expected an integer"),
        (lambda: masks.lambda_shaped(8, sinks=-1), "lambda_shaped: sinks is -1; .*at least 0"),
        (lambda: masks.lambda_shaped(8, window=0), "lambda_shaped: window is 0"),
        (lambda: masks.causal_blockwise(8, block=0), "causal_blockwise: block is 0"),
        (lambda: masks.causal_blockwise(8, local=-1), "causal_blockwise: local is -1"),
        (lambda: masks.causal_blockwise(8, sink=-1), "causal_blockwise: sink is -1"),
        (lambda: masks.shared_question(8, answers=0), "shared_question: answers is 0"),
        (lambda: masks.shared_question(8, question=9), "question is 9; at most 8 is allowed"),
        (lambda: masks.shared_question(8, answers=[4, 5]), "answers of 9 tokens .* sequence, 8"),
        (lambda: masks.shared_question(8, answers=[4], question=3), "4 tokens and question 3"),
        (lambda: masks.prefix_lm(8, prefix=9), "prefix_lm: prefix is 9; at most 8 is allowed"),
        (lambda: masks.prefix_lm(8, prefix=-1), "prefix is -1"),
        (lambda: masks.document_packed(8, documents=[3, 4]), "add up to 7 tokens; .* 8"),
        (lambda: masks.document_packed(8, documents=[9, -1]), r"documents\[1\] is -1"),
        (lambda: masks.document_packed(8, documents=[]), "documents is .*list of integers"),
        (lambda: masks.document_packed(8, documents=8), "documents is 8; .*list of integers"),
        (lambda: masks.global_sliding(8, num_global=-1), "global_sliding: num_global is -1"),
        (lambda: masks.global_sliding(8, window=0), "global_sliding: window is 0"),
        (lambda: masks.block_causal(8, chunk=0), "block_causal: chunk is 0"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_value_and_what_is_allowed(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_building_and_counting_masks_does_not_import_torch():
    code = (
        "import sys; from dyncp import masks; m = masks.causal(64) & masks.sliding_window(64);"
        "m.draw(); masks.from_mask_mod(lambda b, h, q, k: q >= k, 8);"
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
