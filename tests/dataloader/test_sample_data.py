"""Sample ids, per-sample fields, the user's own fields, and the number of batches."""

from collections import UserDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset

from dyncp import DCPDataLoader, PlannerConfig, masks
from dyncp.samples.local_data import fingerprint_tensor
from processes import run_ranks

pytestmark = pytest.mark.usefixtures("plans_here")

LENGTHS = (5, 9, 3, 12, 1, 7)
SAMPLES = [
    {"input_ids": [i] * n, "url": f"page {i}", "weight": i / 2} for i, n in enumerate(LENGTHS)
]


def fields_of(data, samples):
    return data | {name: [sample[name] for sample in samples] for name in ("url", "weight")}


OPTIONS = {"tokens_per_batch": 16, "sample_ids": True, "collate": fields_of}


def test_every_token_knows_its_sample_and_fields_of_samples_come_along():
    options = OPTIONS | {"local_multiple": 8}
    with DCPDataLoader(SAMPLES, masks.causal, **options) as loader:
        for data, _ in loader:
            tokens = data["input_ids"][data["sample_ids"] >= 0]
            ids = data["sample_ids"][data["sample_ids"] >= 0]
            assert tokens.tolist() == ids.tolist()
            found = sorted(set(ids.tolist()))
            assert data["sample_ids"].shape == data["input_ids"].shape
            assert data["url"] == [f"page {i}" for i in found]
            assert data["weight"] == [i / 2 for i in found]


def test_collate_adds_what_it_likes():
    def collate(data, samples):
        assert "num_items_in_batch" not in data
        return data | {"weights": torch.tensor([sample["weight"] for sample in samples])}

    with DCPDataLoader(SAMPLES, masks.causal, collate=collate) as loader:
        ((data, _),) = loader
    assert data["weights"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert data["num_items_in_batch"] == sum(LENGTHS) - 6


def test_a_collate_that_drops_fields_does_not_drop_what_identifies_the_batch():
    def collate(data, samples):
        return {name: data[name] for name in ("input_ids", "position_ids")}

    with DCPDataLoader(SAMPLES, masks.causal, collate=collate) as loader:
        ((data, plan),) = loader
    assert torch.equal(data["batch_fingerprint"], fingerprint_tensor(plan.fingerprint))
    assert data["num_items_in_batch"] == sum(LENGTHS) - 6


def test_targets_are_counted_after_collate():
    def collate(data, samples):  # every second token is no target
        labels = data["shift_labels"].clone()
        labels[:, ::2] = -100
        return data | {"shift_labels": labels}

    with DCPDataLoader(SAMPLES, masks.causal, collate=collate) as loader:
        ((data, _),) = loader
    assert data["num_items_in_batch"] == (data["shift_labels"] != -100).sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collate": 3}, "collate is int; expected a function"),
        (
            {"collate": lambda _data, _samples: None},
            "collate returned NoneType; expected a dict",
        ),
        ({"collate": lambda _data, samples: samples[9]}, "collate raised IndexError: list index"),
        (
            {"collate": lambda data, _samples: data | {"position_ids": torch.zeros(1, 3)}},
            r"collate returned position_ids of shape \(1, 3\); the plan has 37 rows",
        ),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        list(DCPDataLoader(SAMPLES, masks.causal, **options))


def evaluate(rank):
    """Ids and urls on 2 replicas of 2 ranks; 3 batches, so that the last round has a filler."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    options = OPTIONS | {"planner": PlannerConfig("bisection", block_size=2), "evaluation": True}
    with DCPDataLoader(SAMPLES, masks.causal, group=mesh, **options) as loader:
        found = [(data["sample_ids"].flatten().tolist(), data["url"]) for data, _ in loader]
    dist.barrier()  # rank 0 has the store
    return found


def test_fillers_are_nobodys_samples():
    rounds = [step for result in run_ranks(evaluate, 4) for step in result]
    tokens = [i for ids, _ in rounds for i in ids if i >= 0]
    assert sorted(tokens) == [i for i, n in enumerate(LENGTHS) for _ in range(n)]
    assert {-1} in [set(ids) for ids, _ in rounds]
    assert all(len(urls) == len(set(ids) - {-1}) for ids, urls in rounds)


class Documents(Dataset):
    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, index):
        return SAMPLES[index]


def test_the_number_of_batches_is_known_of_lists_and_after_an_epoch():
    for dataset in (SAMPLES, Documents()):
        loader = DCPDataLoader(dataset, masks.causal, tokens_per_batch=16, shuffle=True)
        with loader:
            for epoch in range(3):
                assert loader.epoch == epoch
                expected = len(loader) if epoch or isinstance(dataset, list) else None
                found = sum(1 for _ in loader)
                assert expected in (found, None)
    with pytest.raises(TypeError, match="before an epoch has read them"):
        len(DCPDataLoader(Documents(), masks.causal))
    padded = [{"input_ids": [1, 2], "attention_mask": [1, 0]}]
    with pytest.raises(TypeError, match="before an epoch has read them"):
        len(DCPDataLoader(padded, masks.causal))


def test_the_number_of_batches_is_known_of_what_a_tokenizer_gives():
    """BatchEncodings are mappings, not dicts, with an attention_mask of ones."""
    samples = [UserDict(input_ids=[1] * n, attention_mask=[1] * n) for n in LENGTHS]
    with DCPDataLoader(samples, masks.causal, tokens_per_batch=16) as loader:
        assert len(loader) == len(list(loader)) > 2


def test_the_number_of_batches_is_counted_once_per_epoch():
    calls = []

    def budget(number):
        calls.append(number)
        return 16

    loader = DCPDataLoader(SAMPLES, masks.causal, tokens_per_batch=budget)
    first = len(loader)
    counted = len(calls)
    assert len(loader) == first
    assert len(calls) == counted
    loader.set_epoch(1)
    assert len(loader) == first
    assert len(calls) > counted
