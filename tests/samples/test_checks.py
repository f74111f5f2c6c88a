"""Samples that could be trained on, but not as they are meant: errors, or one warning, with their
numbers."""

import logging

import pytest
import torch
from torch.utils.data import IterableDataset

from dyncp import (
    AttentionShape,
    Batch,
    DCPDataLoader,
    LoaderTuning,
    ModelConfig,
    Topology,
    make_local_data,
    masks,
    plan_batch,
)
from dyncp.samples.checks import MixedLabels, SampleLimits
from processes import run_ranks

pytestmark = pytest.mark.usefixtures("plans_here")

NONE = -100
GOOD = {"input_ids": list(range(20, 32))}
LABELLED = GOOD | {"labels": [NONE] * 4 + GOOD["input_ids"][4:]}
SIZES = ModelConfig(16, 1, 32, 64, 2, 1, 8, positions=16, learned_positions=True)


def read(samples, **options):
    with DCPDataLoader(samples, masks.causal, **options) as loader:
        return [data["input_ids"].shape[1] for data, _ in loader], loader.metrics.snapshot()


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


MISTAKES = {
    "labels shifted to the left": (
        {"labels": [*range(21, 32), NONE]},
        "labels of sample 1 are shifted already: each is the next token",
    ),
    "labels shifted, of an answer": (
        {"labels": [NONE] * 5 + [*range(26, 32), NONE]},
        "each is the next token",
    ),
    "labels shifted to the right": ({"labels": [NONE, *range(20, 31)]}, "the previous token"),
    "another label for nothing": (
        {"labels": [*range(20, 31), -1]},
        r"labels\[11\] of sample 1 is -1; allowed is 0 and above, or -100 for a token that is",
    ),
    "shift_labels": ({"shift_labels": [0] * 12}, "sample 1 has shift_labels, which dyncp makes"),
    "a mask of the completion": ({"completion_mask": [1] * 12}, "has completion_mask but no lab"),
    "a mask of the loss": ({"loss_mask": [1] * 12}, "sample 1 has loss_mask but no labels"),
    "weights of the loss": ({"loss_weights": [0.5] * 12}, "sample 1 has loss_weights but no l"),
    "masks of the assistant": ({"assistant_masks": [1] * 12}, "has assistant_masks but no labe"),
    "a negative token": ({"input_ids": [1, 2, -1]}, r"input_ids\[2\] of sample 1 is -1"),
    "negative positions": ({"position_ids": range(-1, 11)}, "sample 1 has position -1"),
}
OF_MODELS = {
    "a token outside the vocabulary": (
        {"input_ids": [3, 64]},
        r"is 64; allowed is 0 to 63, the model's voc",
    ),
    "a label outside the vocabulary": (
        {"labels": [*range(20, 31), 64]},
        r"labels\[11\] of sample 1 is 64",
    ),
    "a sample beyond the positions": (
        {"input_ids": list(range(17))},
        r"sample 1 has position 16; the model has positions 0 to 15",
    ),
    "positions beyond the model's": (
        {"position_ids": range(5, 17)},
        r"sample 1 has position 16; the model has positions 0 to 15",
    ),
}


def with_mistake(change):
    first = LABELLED if "labels" in change else GOOD
    return [first, GOOD | {name: list(value) for name, value in change.items()}]


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("kind", [list, Stream])
def test_mistakes_are_errors_that_name_the_sample(what, kind):
    change, message = MISTAKES[what]
    with pytest.raises(ValueError, match=message):
        read(kind(with_mistake(change)))


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_errors_in_batches_of_ones_own(what):
    change, message = MISTAKES[what]
    samples = with_mistake(change)
    batch = Batch.of([masks.causal(sample) for sample in samples])
    with pytest.raises(ValueError, match=message):
        make_local_data(samples, batch, plan_batch(batch, Topology()))


def test_mixed_labels_and_padding_are_errors_in_batches_of_ones_own():
    padded = GOOD | {"attention_mask": [1] * 8 + [0] * 4}
    batch = Batch.of([masks.causal(12)] * 2)
    plan = plan_batch(batch, Topology())
    with pytest.raises(MixedLabels, match="sample 1 has labels and sample 0 has none"):
        make_local_data([GOOD, LABELLED], batch, plan)
    with pytest.raises(ValueError, match="attention_mask of sample 1 marks padding"):
        make_local_data([GOOD, padded], batch, plan)
    unpadded = GOOD | {"attention_mask": [1] * 12}
    assert make_local_data([GOOD, unpadded], batch, plan)["num_items_in_batch"] == 22


@pytest.mark.parametrize("what", OF_MODELS)
def test_what_a_model_does_not_have_is_an_error(what):
    change, message = OF_MODELS[what]
    samples = with_mistake(change)
    with pytest.raises(ValueError, match=message):
        read(samples, model=SIZES)
    shape = SIZES.attention_shape()
    assert read(samples, model=shape)[0] == read(samples)[0]  # nothing is known of the model


def test_samples_with_mistakes_can_be_dropped():
    change, _ = MISTAKES["labels shifted to the left"]
    shapes, metrics = read(with_mistake(change), bad_samples="drop")
    assert shapes == [12]
    assert metrics["skipped"] == {"bad": 1}


@pytest.mark.parametrize(
    "sample",
    [
        LABELLED,
        {"input_ids": [7] * 12, "labels": [7] * 12},
        GOOD | {"labels": [NONE] * 11 + [31]},
        GOOD | {"labels": [NONE] * 12},
        GOOD | {"labels": [5] * 12},
        {"input_ids": [1, 2], "labels": [2, NONE]},  # too short to tell
        LABELLED | {"completion_mask": [0] * 4 + [1] * 8},
    ],
)
def test_other_labels_are_left_alone(sample, caplog):
    with caplog.at_level(logging.WARNING, logger="dyncp"):
        assert read([sample], model=SIZES)[0] == [len(sample["input_ids"])]
    assert not caplog.records


def test_declared_fields_are_data_whatever_their_names():
    sample = GOOD | {"loss_mask": [1] * 12, "shift_labels": [3] * 12}
    options = {"token_fields": {"loss_mask": 0, "shift_labels": 0}}
    with pytest.raises(ValueError, match="shift_labels"):
        read([sample], token_fields={"loss_mask": 0})
    assert read([sample], **options)[0] == [12]


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize(("first", "then"), [(GOOD, LABELLED), (LABELLED, GOOD)])
def test_labels_in_some_samples_only_are_an_error(first, then, kind):
    pair = "sample 2 has labels and sample 0" if first is GOOD else "sample 0 has labels and sample"
    for options in ({}, {"bad_samples": "drop"}):
        with pytest.raises(MixedLabels, match=pair):
            read(kind([first, first, then]), **options)


def mixed_over_ranks(rank):
    """Each rank reads one sample: one has labels, the other does not."""
    samples = [{"input_ids": [1] * 64}, {"input_ids": [1] * 64, "labels": [1] * 64}]
    tuning = LoaderTuning(num_planners=0)
    try:
        list(DCPDataLoader(samples, masks.causal, lengths=[64, 64], tuning=tuning))
    except Exception as error:
        return str(error)
    return ""


def test_ranks_that_read_different_samples_find_mixed_labels_too():
    told = run_ranks(mixed_over_ranks, 2)
    assert all("sample 1 has labels and sample 0 has none" in text for text in told)


PADDED = {
    "right": {"input_ids": [*range(1, 9), *[0] * 8]},
    "left": {"input_ids": [*[0] * 9, *range(1, 9)]},
    "labels": {"input_ids": [*range(1, 9), *[0] * 8], "labels": [*range(1, 9), *[0] * 8]},
}


@pytest.mark.parametrize("what", PADDED)
def test_padding_that_nothing_marks_is_warned_of_once(what, caplog):
    with caplog.at_level(logging.WARNING, logger="dyncp"):
        read([PADDED[what]] * 3, tokens_per_batch=20)
    assert len(caplog.records) == 1
    assert "sample 0 " in caplog.text
    assert "times token 0, which it has nowhere else" in caplog.text


NOT_PADDED = {
    "marked": {"input_ids": [5, *[0] * 8], "attention_mask": [1] + [0] * 8},
    "no target": {"input_ids": [5, *[0] * 8], "labels": [5, *[NONE] * 8]},
    "elsewhere, too": {"input_ids": [5, 0, 6, *[0] * 8]},
    "all": {"input_ids": [0] * 20},
    "few": {"input_ids": [5, *[0] * 7]},
}


@pytest.mark.parametrize("what", NOT_PADDED)
def test_what_is_no_padding_or_is_marked_is_not_warned_of(what, caplog):
    with caplog.at_level(logging.WARNING, logger="dyncp"):
        read([NOT_PADDED[what]])
    assert not caplog.records


def test_packed_positions_under_a_mask_that_does_not_separate_are_warned_of_once(caplog):
    packed = {"input_ids": list(range(6)), "position_ids": [0, 1, 2, 0, 1, 2]}
    with caplog.at_level(logging.WARNING, logger="dyncp"):
        read([packed] * 2)
    assert caplog.text.count("position_ids of sample 0 begin again at token 3") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dyncp"):
        list(DCPDataLoader([packed | {"document_lengths": [3, 3]}], masks.document_packed))
    assert not caplog.records


def test_rotary_positions_beyond_the_training_are_warned_of_once(caplog):
    sizes = ModelConfig(16, 1, 32, 64, 2, 1, 8, positions=16)
    with caplog.at_level(logging.WARNING, logger="dyncp"):
        read([{"input_ids": list(range(20))}] * 2, model=sizes)
    assert caplog.text.count("sample 0 has position 19; the model has positions 0 to 15") == 1


def test_limits_come_from_models_and_their_configs():
    llama = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "vocab_size": 64,
    }  # fmt: skip
    rotary = llama | {"max_position_embeddings": 128}
    assert SampleLimits.of(rotary) == SampleLimits(64, 128, learned=False)
    learned = llama | {"n_positions": 32, "model_type": "gpt2"}
    assert SampleLimits.of(learned) == SampleLimits(64, 32, learned=True)
    assert SampleLimits.of(llama).positions is None
    for unknown in (None, AttentionShape(2, 1, 8)):
        assert SampleLimits.of(unknown) == SampleLimits()


def test_tensors_are_checked_like_lists():
    ids = torch.arange(20, 32)
    with pytest.raises(ValueError, match="shifted already"):
        read([{"input_ids": ids, "labels": torch.cat([ids[1:], torch.tensor([NONE])])}])
