"""Hugging Face datasets, if `datasets` is installed."""

import pytest

from dyncp import masks
from loaders import make_loader

pytestmark = pytest.mark.usefixtures("plans_here")

datasets = pytest.importorskip("datasets")

LENGTHS = [5, 9, 3, 12, 1, 7]
COLUMNS = {
    "input_ids": [[i] * n for i, n in enumerate(LENGTHS)],
    "num_tokens": LENGTHS,
}


def batches(loader):
    return [sorted(set(data["input_ids"][0].tolist())) for data, _ in loader]


def test_a_dataset_with_a_column_of_lengths():
    dataset = datasets.Dataset.from_dict(COLUMNS)
    with make_loader(
        dataset, masks.causal, lengths="num_tokens", tokens_per_batch=16, window=1
    ) as loader:
        assert len(loader) == 3
        assert batches(loader) == [[0, 1], [2, 3, 4], [5]]
    with pytest.raises(ValueError, match="the dataset's columns are input_ids, num_tokens"):
        make_loader(dataset, masks.causal, lengths="words")
    with make_loader(
        dataset.with_format("torch"), masks.causal, tokens_per_batch=16, window=1
    ) as loader:
        assert batches(loader) == [[0, 1], [2, 3, 4], [5]]


def test_an_iterable_dataset_resumes_by_its_own_state():
    def open_loader():
        stream = datasets.Dataset.from_dict(COLUMNS).to_iterable_dataset(num_shards=2)
        return make_loader(stream, masks.causal, tokens_per_batch=16, window=1)

    with open_loader() as loader:
        whole = batches(loader)
        assert batches(loader) == whole  # another epoch, from the start
        for _ in loader:
            state = loader.state_dict()
            break
    assert '"stream"' in state["position"]["dataset_state"]
    with open_loader() as loader:
        loader.load_state_dict(state)
        assert batches(loader) == whole[1:]
        again = batches(loader)  # another epoch, in which datasets may order its shards otherwise
        assert sorted(i for batch in again for i in batch) == list(range(6))


def test_a_shuffle_buffer_which_is_not_in_the_streams_state_resumes_by_reading_again():
    columns = {"input_ids": [[i] * (1 + i % 5) for i in range(40)]}

    def open_loader(seed=3):
        stream = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=4)
        stream = stream.shuffle(seed=seed, buffer_size=8).map(lambda sample: sample)
        return make_loader(stream, masks.causal, tokens_per_batch=16)

    with open_loader() as loader:
        states, whole = [], []
        for data, _ in loader:
            whole.append(sorted(set(data["input_ids"][0].tolist())))
            states.append(loader.state_dict())
        assert batches(loader) != whole  # another epoch
    assert sorted(i for batch in whole for i in batch) == list(range(40))
    for taken in (1, 3, len(whole) - 1):
        with open_loader() as loader:
            loader.load_state_dict(states[taken - 1])
            assert batches(loader) == whole[taken:]
    with open_loader(seed=4) as loader:
        loader.load_state_dict(states[1])
        with pytest.raises(ValueError, match="dataset IterableDataset does not give the same"):
            list(loader)
