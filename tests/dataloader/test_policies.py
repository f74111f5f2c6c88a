"""Samples that are bad, empty, too long or padded."""

import logging
from itertools import chain

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from dyncp import DCPDataLoader, masks
from dyncp.samples import SampleError

pytestmark = pytest.mark.usefixtures("plans_here")


class Documents(Dataset):
    """Samples given by their length, by an error to raise, or as they are."""

    def __init__(self, *contents):
        self.contents = contents

    def __len__(self):
        return len(self.contents)

    def __getitem__(self, index):
        content = self.contents[index]
        if isinstance(content, int):
            return {"input_ids": torch.full((content,), index), "sample": [index] * content}
        if isinstance(content, Exception):
            raise content
        return content


class Stream(IterableDataset):
    def __init__(self, documents):
        self.documents, self.given = documents, 0

    def __iter__(self):
        while self.given < len(self.documents):
            self.given += 1
            yield self.documents[self.given - 1]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def ids(loader):
    return [data["input_ids"][0].tolist() for data, _ in loader]


def all_ids(dataset, **options):
    with DCPDataLoader(dataset, masks.causal, **options) as loader:
        return sorted(chain(*ids(loader))), loader.metrics.snapshot()["skipped"]


BAD = Documents(2, OSError("disk on fire"), 1, {"tokens": [1]}, 0, {"input_ids": [0.5]}, 3)


def test_bad_and_empty_samples_are_left_out_and_counted(caplog):
    with caplog.at_level(logging.WARNING, logger="dyncp"):
        found, skipped = all_ids(BAD, bad_samples="drop")
    assert found == [0, 0, 2, 6, 6, 6]
    assert skipped == {"bad": 3, "empty": 1}
    assert "sample 1 is skipped (bad): reading of sample 1 raised OSError: disk on fire" in (
        caplog.text
    )
    with pytest.raises(SampleError, match="reading of sample 1 raised OSError"):
        all_ids(BAD, bad_samples="drop_empty")
    assert all_ids(Documents(2, 0), bad_samples="drop_empty") == ([0, 0], {"empty": 1})
    with pytest.raises(ValueError, match=r"input_ids of sample 1 has shape \(0,\)"):
        all_ids(Documents(2, 0))
    wrong_labels = {"input_ids": [1, 2], "labels": [1]}
    assert all_ids(Documents(2, wrong_labels), bad_samples="drop") == ([0, 0], {"bad": 1})


def test_what_cannot_be_left_out_is_refused():
    with pytest.raises(ValueError, match="bad_samples='drop' must read every sample"):
        DCPDataLoader(BAD, masks.causal, bad_samples="drop", lengths=[1] * 7)
    with pytest.raises(ValueError, match="bad_samples is 'skip'; choose one of error, drop, dr"):
        DCPDataLoader(BAD, masks.causal, bad_samples="skip")
    with pytest.raises(ValueError, match=r"lengths says 0 tokens for sample 1; .*bad_samples="):
        DCPDataLoader(Documents(2, 0), masks.causal, lengths=[2, 0])


def test_empty_samples_may_be_known_by_their_lengths():
    options = {"lengths": [2, 0, 1], "bad_samples": "drop_empty"}
    with DCPDataLoader(Documents(2, OSError(), 1), masks.causal, **options) as loader:
        assert len(loader) == 1
        assert ids(loader) == [[0, 0, 2]]
    assert loader.metrics.snapshot()["skipped"] == {"empty": 1}  # not counted again by len


def test_a_stream_resumes_behind_samples_that_are_left_out():
    documents = [BAD[i] for i in (0, 2)] + [{"tokens": 1}] + [{"input_ids": [i] * 2} for i in "789"]
    for sample in documents[3:]:
        sample["input_ids"] = [int(i) for i in sample["input_ids"]]
    options = {"bad_samples": "drop", "tokens_per_batch": 3}
    with DCPDataLoader(Stream(documents), masks.causal, **options) as loader:
        states = [loader.state_dict()]
        plain = []
        for data, _ in loader:
            plain.append(data["input_ids"][0].tolist())
            states.append(loader.state_dict())
    assert sorted(chain(*plain)) == [0, 0, 2, 7, 7, 8, 8, 9, 9]
    for taken, state in enumerate(states):
        with DCPDataLoader(Stream(documents), masks.causal, **options) as loader:
            loader.load_state_dict(state)
            assert ids(loader) == plain[taken:]


def test_too_long_samples_are_split_into_pieces_of_the_longest_length():
    sample = {"input_ids": list(range(10)), "labels": list(range(100, 110)), "grade": [7] * 10}
    options = {"too_long": "split", "tokens_per_batch": 4, "token_fields": {"grade": 0}}
    for more in ({}, {"lengths": [10]}):
        with DCPDataLoader([sample], masks.causal, **options, **more) as loader:
            data = [data for data, _ in loader]
        assert [d["input_ids"][0].tolist() for d in data] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert [d["position_ids"][0].tolist() for d in data] == [[0, 1, 2, 3]] * 2 + [[0, 1]]
        assert data[1]["shift_labels"][0].tolist() == [105, 106, 107, -100]
        assert data[2]["grade"].shape == (1, 2)
    with pytest.raises(ValueError, match="set max_length to the smallest budget"):
        all_ids(Documents(9), too_long="split", tokens_per_batch=lambda _: 4)
    schedule = {"tokens_per_batch": lambda number: 4 + number, "max_length": 4}
    assert len(all_ids(Documents(9, 3), too_long="split", **schedule)[0]) == 12


def test_pieces_of_a_sample_resume_exactly():
    documents = Documents(23, 3, 9, 1, 17)
    options = {"too_long": "split", "tokens_per_batch": 8, "shuffle": True}
    with DCPDataLoader(documents, masks.causal, **options) as loader:
        states, plain = [], []
        for data, _ in loader:
            plain.append((data["input_ids"][0].tolist(), data["position_ids"][0].tolist()))
            states.append(loader.state_dict())
        assert sum(len(tokens) for tokens, _ in plain) == 53
        for taken, state in enumerate(states[:-1], 1):
            loader.load_state_dict(state)
            rest = [(d["input_ids"][0].tolist(), d["position_ids"][0].tolist()) for d, _ in loader]
            assert rest == plain[taken:]


def test_dropped_samples_are_counted_by_reason():
    assert all_ids(Documents(2, 9, 1), max_length=8, too_long="drop") == (
        [0, 0, 2],
        {"too_long": 1},
    )


def test_padding_is_left_out():
    padded = {
        "input_ids": [0, 0, 5, 6, 7, 0],
        "attention_mask": torch.tensor([0, 0, 1, 1, 1, 0]),
        "labels": [-100, -100, 5, 6, 7, -100],
        "grid": torch.arange(12).view(2, 6),
    }
    for more in ({}, {"lengths": [3]}):
        with DCPDataLoader([padded], masks.causal, token_fields={"grid": 1}, **more) as loader:
            ((data, _),) = loader
        assert data["input_ids"].tolist() == [[5, 6, 7]]
        assert data["shift_labels"].tolist() == [[6, 7, -100]]
        assert data["position_ids"].tolist() == [[0, 1, 2]]
        assert data["grid"].tolist() == [[[2, 3, 4]], [[8, 9, 10]]]
        assert data["num_items_in_batch"] == 2


def test_padded_samples_are_cut_without_their_padding():
    sample = {"input_ids": [9, 1, 2, 3, 4, 5], "attention_mask": [0, 1, 1, 1, 1, 1]}
    seen = []

    def mask_fn(sample):
        seen.append((list(sample["input_ids"]), list(sample["attention_mask"])))
        return masks.causal(sample)

    for data, _ in DCPDataLoader([sample], mask_fn, max_length=3, too_long="split"):
        assert data["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert seen == [([1, 2, 3, 4, 5], [1] * 5)] * 2  # the whole sample, for each piece


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_mask": [1, 0, 1]}, "is 0 at token 1, between tokens that are not padding"),
        ({"attention_mask": [1, 1]}, r"has shape \(2,\); expected a 1 .* each of its 3 tokens"),
        ({"attention_mask": [1, 1, 2]}, r"expected a 1 \(token\) or 0"),
        ({"attention_mask": [[1] * 3] * 3}, r"shape \(3, 3\).* the mask function says"),
        ({"padding_mask": [0, 0, 1]}, "sample 0 has a field 'padding_mask'"),
        ({"attention_mask": [0, 0, 0]}, "at least one token"),
    ],
)
def test_other_padding_is_refused(fields, message):
    sample = {"input_ids": [1, 2, 3], **fields}
    with pytest.raises(ValueError, match=message):
        list(DCPDataLoader([sample], masks.causal))


def test_a_declared_attention_mask_is_a_field_like_others():
    sample = {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}
    ((data, _),) = DCPDataLoader([sample], masks.causal, token_fields={"attention_mask": 0})
    assert data["attention_mask"].tolist() == [[1, 0, 1]]
    assert data["input_ids"].tolist() == [[1, 2, 3]]


def test_a_step_without_targets_has_a_loss_of_zero():
    sample = {"input_ids": [1, 2, 3], "labels": [-100] * 3}
    ((data, _),) = DCPDataLoader([sample], masks.causal)
    assert data["num_items_in_batch"] == 1  # what a loss is divided by: 0 / 1, not 0 / 0
    assert (data["shift_labels"] == -100).all()
