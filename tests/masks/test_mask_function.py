"""Call rules, composition, pickling and printing of mask functions."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from dyncp import masks
from dyncp.masks import Mask, MaskFunction, mask_function


@mask_function
def first_keys(length: int, keys: int) -> Mask:
    return Mask([[[0, keys]]] * length, name="first_keys")


def prefix_of(sample):
    return sample["question_length"]


def causal_mod(b, h, q, k):
    return q >= k


def sample_of(length, **fields):
    return {"input_ids": list(range(length)), **fields}


def test_a_length_gives_a_mask():
    assert isinstance(masks.causal(4096), Mask)
    assert masks.causal(np.int64(5)) == masks.causal(5)


def test_a_length_with_parameters_gives_a_mask():
    assert masks.sliding_window(9, window=3).num_pairs == 1 + 2 + 7 * 3


def test_parameters_alone_give_a_mask_function():
    function = masks.sliding_window(window=3)
    assert isinstance(function, MaskFunction)
    assert function(9) == masks.sliding_window(9, window=3)


def test_later_parameters_win_and_earlier_ones_stay():
    function = masks.lambda_shaped(sinks=2, window=5)(window=3)
    assert function(20) == masks.lambda_shaped(20, sinks=2, window=3)
    assert function(20, sinks=1) == masks.lambda_shaped(20, sinks=1, window=3)


@pytest.mark.parametrize("ids", [[1, 2, 3], np.arange(3), torch.arange(3), (1, 2, 3)])
def test_a_sample_gives_a_mask_of_its_length(ids):
    assert masks.causal({"input_ids": ids}) == masks.causal(3)


def test_a_parameter_may_be_a_function_of_the_sample():
    function = masks.prefix_lm(prefix=lambda sample: sample["question_length"])
    assert function(sample_of(6, question_length=4)) == masks.prefix_lm(6, prefix=4)


def test_a_function_of_the_sample_needs_a_sample():
    with pytest.raises(ValueError, match=r"masks.prefix_lm: prefix comes from a sample.*length"):
        masks.prefix_lm(prefix=prefix_of)(6)


def test_packed_documents_are_read_from_the_sample():
    expected = masks.document_packed(6, documents=[2, 4])
    assert masks.document_packed(sample_of(6, document_lengths=[2, 4])) == expected
    assert masks.document_packed(sample_of(6, document_lengths=torch.tensor([2, 4]))) == expected
    assert masks.document_packed(sample_of(6), documents=[2, 4]) == expected
    with pytest.raises(ValueError, match=r"documents comes from a sample.*'document_lengths'"):
        masks.document_packed(6)
    with pytest.raises(ValueError, match=r"no 'document_lengths'; it has: input_ids"):
        masks.document_packed(sample_of(6))


def test_the_prefix_is_read_from_the_sample():
    sample = sample_of(6, prefix_length=torch.tensor(2))
    assert masks.prefix_lm(sample) == masks.prefix_lm(6, prefix=2)


def test_an_unknown_parameter_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"lambda_shaped has no parameter win; .*sinks, window"):
        masks.lambda_shaped(win=3)
    with pytest.raises(ValueError, match=r"causal has no parameter window; allowed: none"):
        masks.causal(5, window=3)
    with pytest.raises(ValueError, match=r"takes no parameters, but window"):
        (masks.causal & masks.full)(window=3)


def test_a_missing_parameter_is_named():
    with pytest.raises(ValueError, match="first_keys needs keys="):
        first_keys(4)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (0, "length of a sequence is 0; at least 1"),
        (-3, "length of a sequence is -3"),
        ({"input_ids": []}, "number of input_ids is 0; at least 1"),
        ({"tokens": [1]}, "no 'input_ids'; it has: tokens"),
        ({"input_ids": np.zeros((2, 3))}, r"shape \(2, 3\); they must have one axis"),
        ("abc", "called with str; give it a length"),
        (2.5, "called with float"),
        (True, "called with bool"),
        ([1, 2], "called with list"),
    ],
)
def test_a_wrong_subject_is_refused(subject, message):
    with pytest.raises(ValueError, match=message):
        masks.causal(subject)


def test_mask_functions_compose():
    function = masks.document_packed & (masks.sliding_window(window=2) | masks.lambda_shaped)
    sample = sample_of(6, document_lengths=[2, 4])
    expected = masks.document_packed(sample) & (
        masks.sliding_window(6, window=2) | masks.lambda_shaped(6)
    )
    assert function(sample) == expected
    assert (masks.causal & masks.full)(5) == masks.causal(5)
    with pytest.raises(TypeError):
        masks.causal & 5


@pytest.mark.parametrize(
    "function",
    [
        *masks.BUILTIN.values(),
        masks.sliding_window(window=5),
        masks.prefix_lm(prefix=prefix_of),
        masks.causal & masks.sliding_window(window=5) | masks.full,
        masks.named(default=masks.causal, local=masks.sliding_window(window=5)),
        first_keys(keys=1),
    ],
    ids=repr,
)
def test_mask_functions_survive_pickling(function):
    again = pickle.loads(pickle.dumps(function))
    sample = sample_of(
        7,
        document_lengths=[3, 4],
        prefix_length=2,
        question_length=3,
        parents=[-1, 0],
        node_lengths=[3, 4],
    )
    assert repr(again) == repr(function)
    assert again(sample) == function(sample)


def test_a_mask_function_without_parameters_is_one_object_in_every_process():
    assert pickle.loads(pickle.dumps(masks.causal)) is masks.causal


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (masks.causal, "masks.causal"),
        (masks.sliding_window(window=512), "masks.sliding_window(window=512)"),
        (masks.prefix_lm(prefix=prefix_of), "masks.prefix_lm(prefix=prefix_of)"),
        (
            masks.causal & masks.sliding_window(window=512),
            "(masks.causal & masks.sliding_window(window=512))",
        ),
        (masks.named(default=masks.causal), "masks.named(default=masks.causal)"),
        (masks.from_mask_mod(causal_mod, name="x"), "masks.from_mask_mod(x)"),
        (first_keys(keys=3), "first_keys(keys=3)"),
    ],
)
def test_a_mask_function_prints_as_it_is_written(function, text):
    assert repr(function) == text


def test_a_mask_function_keeps_the_documentation_of_its_builder():
    assert masks.sliding_window.__name__ == "sliding_window"
    assert "window" in masks.sliding_window.__doc__


def test_named_masks_give_one_mask_per_name():
    function = masks.named(default=masks.causal, local=masks.sliding_window(window=2))
    result = function(sample_of(5))
    assert result == {"default": masks.causal(5), "local": masks.sliding_window(5, window=2)}
    assert function(5) == result


def test_named_masks_take_any_function_of_the_sample():
    def mine(sample):
        return masks.full(len(sample["input_ids"]))

    assert masks.named(default=mine)(sample_of(3)) == {"default": masks.full(3)}


def test_named_masks_refuse_what_cannot_be_one_sample():
    with pytest.raises(ValueError, match="at least one mask"):
        masks.named()
    with pytest.raises(ValueError, match="local is int; expected a mask function"):
        masks.named(local=3)
    two_texts = masks.named(
        default=masks.document_packed(documents=[2, 3]), other=masks.shared_question(question=1)
    )
    with pytest.raises(ValueError, match="disagree about positions"):
        two_texts(5)
    with pytest.raises(ValueError, match=r"different lengths: \{'a': 5, 'b': 4\}"):
        masks.named(a=masks.causal, b=lambda _: masks.causal(4))(5)
