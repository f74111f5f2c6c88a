"""Batches are a function of order, lengths, budget and position."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from dyncp import masks
from dyncp.dataloader.batching import BatchSelector
from dyncp.dataloader.state import Position, from_state, to_state
from dyncp.samples.source import open_source
from loaders import make_config, make_loader
from sizes import draws

pytestmark = pytest.mark.usefixtures("plans_here")

LENGTHS = (5, 9, 3, 12, 1, 7)
SAMPLES = [{"input_ids": [i] * n, "tokens": n} for i, n in enumerate(LENGTHS)]


SETTINGS = {"seed": 0, "accumulation_steps": 2, "tokens_per_batch": 16, "lengths": ""}


def make(samples=SAMPLES, **options):
    return make_loader(samples, masks.causal, **{"window": 1, "sample_ids": True} | options)


def ids(loader):
    """The samples of each batch, with their numbers of tokens."""
    return [Counter(sorted(data["sample_ids"][0].tolist())) for data, _ in loader]


def load(**options):
    """The samples of each batch of a loader."""
    with make(**options) as loader:
        return list(map(list, ids(loader)))


def batching(samples=SAMPLES, replica=0, num_replicas=1, window=1, **options):
    config = make_config(window=window, **options)
    source = open_source(samples, config.samples)
    seconds = lambda length: float(length**2)  # noqa: E731
    return BatchSelector(source, config, config.budget(1, None), replica, num_replicas, seconds)


def indices(steps):
    return [[[e.index for e in s.entries] for s in update.selections] for update in steps]


def batches(start=None, **options):
    steps = batching(**options).updates(start or Position())
    return [batch for step in indices(steps) for batch in step]


def test_a_budget_may_follow_a_schedule():
    schedule = [5, 12, 14, 100]
    assert load(tokens_per_batch=lambda number: schedule[number]) == [[0], [1, 2], [3, 4], [5]]
    assert load(tokens_per_batch=lambda number: schedule[number] + 0.5)[1:] == [
        [1, 2],
        [3, 4],
        [5],
    ]
    with pytest.raises(ValueError, match="tokens_per_batch of batch 0 is nan; expected an integer"):
        load(tokens_per_batch=lambda _: float("nan"))
    with pytest.raises(ValueError, match="tokens_per_batch of batch 1 is 0; at least 1"):
        load(tokens_per_batch=lambda number: 30 - 30 * number)


def test_over_long_samples_are_refused_cut_or_dropped():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens, more than max_length=8; raise it"):
        load(max_length=8)
    with pytest.raises(ValueError, match="sample 3 has 12 tokens, more than tokens_per_batch=11"):
        load(tokens_per_batch=11)
    assert load(max_length=8, too_long="drop") == [[0, 2, 4, 5]]
    assert load(tokens_per_batch=8, too_long="drop") == [[0, 2], [4, 5]]
    with make(max_length=8, too_long="truncate") as loader:
        (tokens,) = ids(loader)
    assert list(tokens.values()) == [5, 8, 3, 8, 1, 7]


def test_a_truncated_sample_is_cut_in_all_its_token_fields():
    sample = {"input_ids": list(range(6)), "labels": list(range(6)), "grid": np.zeros((3, 6))}
    options = {"max_length": 4, "too_long": "truncate", "token_fields": {"grid": 1}}
    with make_loader([sample], masks.causal, **options) as loader:
        ((data, _),) = loader
    assert data["input_ids"].tolist() == data["labels"].tolist() == [[0, 1, 2, 3]]
    assert data["grid"].shape == (3, 1, 4)


def test_drop_last_drops_what_is_not_full():
    assert load(tokens_per_batch=16, drop_last=True) == [[0, 1], [2, 3, 4]]
    assert load(tokens_per_batch=14, drop_last=True) == [[0, 1], [2], [3, 4]]
    steps = batching(tokens_per_batch=16, drop_last=True, accumulation_steps=2)
    assert indices(steps.updates(Position())) == [[[0, 1], [2, 3, 4]]]


def test_replicas_get_different_batches_and_equally_many():
    own = [
        batching(replica=r, num_replicas=2, tokens_per_batch=16, accumulation_steps=2)
        for r in (0, 1)
    ]
    assert indices(own[0].updates(Position())) == [[[0, 1], [5]]]
    steps = list(own[1].updates(Position()))
    assert indices(steps) == [[[2, 3, 4], [5]]]
    assert [s.filler for s in steps[0].selections] == [False, True]  # counted by replica 0 alone
    dropping = {"num_replicas": 2, "tokens_per_batch": 16, "drop_last": True}
    assert batches(**dropping) == [[0, 1]]


def test_samplers_say_the_order_or_the_batches():
    assert load(sampler=[5, 3, 0], tokens_per_batch=16) == [[5], [3], [0]]
    made = [[0, 5], [3], [1, 2, 4]]
    with make(batch_sampler=made) as loader:
        iterator = iter(loader)
        assert list(ids([next(iterator)])[0]) == made[0]
        state = loader.state_dict()
        assert list(map(list, ids(iterator))) == made[1:]
        loader.load_state_dict(state)
        assert list(map(list, ids(loader))) == made[1:]
    for wrong in (
        {"shuffle": True, "sampler": [0]},
        {"sampler": [0], "batch_sampler": [[0]]},
        {"batch_sampler": [[0]], "tokens_per_batch": 8},
    ):
        with pytest.raises(ValueError, match=r"pass only one of them|would have no effect"):
            make_loader(SAMPLES, masks.causal, **wrong)


def test_lengths_spare_reading():
    class Unreadable(Dataset):
        def __len__(self):
            return len(LENGTHS)

        def __getitem__(self, index):
            raise AssertionError("sample was read")

    assert batches(samples=Unreadable(), lengths=LENGTHS, tokens_per_batch=16) == [
        [0, 1], [2, 3, 4], [5],
    ]  # fmt: skip
    assert len(make_loader(Unreadable(), masks.causal, lengths=LENGTHS, tokens_per_batch=16)) == 3
    assert batches(lengths="tokens", tokens_per_batch=16) == [[0, 1], [2, 3, 4], [5]]
    for dataset, lengths, message in (
        (SAMPLES, "words", "sample 0 has no such field"),
        (Unreadable(), "tokens", "Unreadable has no columns; pass an array"),
        (SAMPLES, [1, 2], "one integer for each of the dataset's 6 samples"),
        (SAMPLES, [1, 1, 0, 1, 1, 1], "says 0 tokens for sample 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make_loader(dataset, masks.causal, lengths=lengths)


def test_lengths_that_are_wrong_are_noticed_when_the_sample_is_read():
    with (
        make_loader(SAMPLES, masks.causal, lengths=[5, 9, 4, 12, 1, 7]) as loader,
        pytest.raises(ValueError, match="sample 2 has 3 tokens; lengths= says 4"),
    ):
        list(loader)


class Stream(IterableDataset):
    """Resumes from its state; counts the samples that it yields."""

    def __init__(self):
        self.given, self.reads = 0, 0

    def __len__(self):
        return len(SAMPLES)

    def __iter__(self):
        while self.given < len(SAMPLES):
            self.given += 1
            self.reads += 1
            yield SAMPLES[self.given - 1]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def test_a_stream_with_a_state_resumes_without_reading_again():
    stream, options = Stream(), {"tokens_per_batch": 16, "look_ahead": 0}
    with make(stream, **options) as loader:
        next(iter(loader))
        assert stream.given == 3  # one was read that is in the next batch
        state = loader.state_dict()
    resumed = Stream()
    with make(resumed, **options) as loader:
        loader.load_state_dict(state)
        assert list(map(list, ids(loader))) == [[2, 3, 4], [5]]
    assert resumed.reads == 4


def test_streams_refuse_what_needs_an_index():
    for option in ({"shuffle": True}, {"lengths": LENGTHS}, {"sampler": [0]}):
        with pytest.raises(ValueError, match="needs a dataset with __len__ and __getitem__"):
            make_loader(iter(SAMPLES), masks.causal, **option)


@draws(60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    budget=st.integers(20, 60),
    replicas=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    epoch=st.integers(0, 2),
    window=st.sampled_from([1, 2, 16]),
    known=st.booleans(),
    too_long=st.sampled_from(["error", "truncate", "drop", "split"]),
)
def test_every_sample_is_once_in_an_epoch_and_any_position_continues_it(
    lengths, budget, replicas, accumulation, epoch, window, known, too_long
):
    samples = [{"input_ids": [0] * n} for n in lengths]
    options = {
        "samples": samples,
        "num_replicas": replicas,
        "tokens_per_batch": budget,
        "accumulation_steps": accumulation,
        "shuffle": True,
        "lengths": lengths if known else None,
        "window": window,
        "too_long": too_long,
        "max_length": None if too_long == "error" else 12,
    }
    own = [
        [
            s
            for update in batching(replica=r, **options).updates(Position(epoch))
            for s in update.selections
        ]
        for r in range(replicas)
    ]
    assert len({len(batches) for batches in own}) == 1
    seen = [e for batches in own for s in batches if not s.filler for e in s.entries]
    expected = {
        "error": [(i, 0, n) for i, n in enumerate(lengths)],
        "truncate": [(i, 0, min(n, 12)) for i, n in enumerate(lengths)],
        "drop": [(i, 0, n) for i, n in enumerate(lengths) if n <= 12],
        "split": [(i, s, min(12, n - s)) for i, n in enumerate(lengths) for s in range(0, n, 12)],
    }
    assert sorted((e.index, e.start, e.length) for e in seen) == expected[too_long]
    assert all(s.num_tokens <= budget for batches in own for s in batches)
    for number, selection in enumerate(own[0]):
        saved = json.loads(json.dumps(to_state(selection.end, SETTINGS, replicas)))
        position = from_state(saved, SETTINGS, replicas)
        resumed = batching(**options).updates(position)
        rest = [s.fingerprint for update in resumed for s in update.selections]
        assert rest == [s.fingerprint for s in own[0][number + 1 :]]


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (4, 1), (1, 3)])
def test_another_number_of_replicas_trains_on_the_rest(before, now):
    lengths = np.random.default_rng(0).integers(1, 60, 300).tolist()
    options = {"samples": [None] * 300, "lengths": lengths, "tokens_per_batch": 64, "shuffle": True}

    def trained(replicas, start, steps=None):
        own = []
        for replica in range(replicas):
            found = batching(replica=replica, num_replicas=replicas, window=8, **options)
            own.append(list(islice(found.updates(start), steps)))
        selections = [s for steps in own for update in steps for s in update.selections]
        return [e.index for s in selections if not s.filler for e in s.entries], own[0][-1]

    first, last = trained(before, Position(), 12)
    position = last.selections[-1].end
    assert position.dealt or before == 1
    rest, _ = trained(now, position)
    assert sorted(first + rest) == list(range(300))


@pytest.mark.parametrize("replicas", [(4, 1, 1, 1), (4, 2, 1, 2), (2, 1, 2, 4, 1)])
def test_replicas_may_change_again_before_all_batches_dealt_ahead_are_passed(replicas):
    lengths = np.random.default_rng(5).integers(1, 17, 300).tolist()
    samples = [{"input_ids": [i] * n} for i, n in enumerate(lengths)]
    options = {"samples": samples, "lengths": lengths, "tokens_per_batch": 16, "window": 8}
    position, trained = Position(), []
    for turn, number in enumerate(replicas):
        last = turn == len(replicas) - 1
        for replica in range(number):
            found = batching(replica=replica, num_replicas=number, **options)
            steps = list(islice(found.updates(position), None if last else 4))
            selections = [one for update in steps for one in update.selections if not one.filler]
            trained += [entry.index for one in selections for entry in one.entries]
        position = steps[-1].selections[-1].end
    assert sorted(trained) == list(range(len(lengths)))


def test_an_empty_dataset_has_no_batches():
    assert batches(samples=[]) == []


def test_a_state_of_other_batches_is_refused():
    state = make(tokens_per_batch=16).state_dict()
    position, terms = state["position"], state["terms"]
    with pytest.raises(ValueError, match="saved with seed=0, this loader has 1"):
        make(tokens_per_batch=16, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with tokens_per_batch=16, this loader has 32"):
        make(tokens_per_batch=32).load_state_dict(state)
    loader = make(tokens_per_batch=16)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    for change, message in (
        ({"terms": terms | {"speed": 0}}, "saved with speed=0, this loader has None"),
        ({"position": {"epoch": 0}}, r"a position with \['epoch'\]; this dyncp reads \['batch"),
        (
            {"position": position | {"batches": 1}, "num_replicas": 2},
            "saved after 1 batches on 2 replicas, which is within an optimiser step of 2 or of 1 r",
        ),
        ({"version": None}, "state has version None"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(state | change)
    with pytest.raises(ValueError, match="state has version None"):
        loader.load_state_dict({})


def test_options_are_checked_when_the_loader_is_made():
    for options, message in (
        ({"look_ahead": -1}, "look_ahead is -1; at least 0"),
        ({"planner": 3}, "planner is int; expected a PlannerConfig"),
        ({"tuning": {}}, "tuning is dict; expected a LoaderTuning"),
        ({"too_long": "cut"}, "too_long is 'cut'; choose one of error, truncate, drop"),
        ({"plan_timeout": 0}, "plan_timeout is 0; must be positive"),
        ({"tokens_per_batch": 0}, "tokens_per_batch is 0; at least 1"),
        ({"tokens_per_batch": 16.5}, "tokens_per_batch is 16.5; expected an integer"),
        ({"accumulation_steps": "2"}, "accumulation_steps is '2'; expected an integer"),
        ({"evaluation": True, "shuffle": True}, "evaluation=True keeps the dataset's order"),
    ):
        with pytest.raises(ValueError, match=message):
            make_loader(SAMPLES, masks.causal, **options)
