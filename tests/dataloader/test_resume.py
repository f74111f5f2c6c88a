"""Resuming is exact, or refused by name."""

import copy
import itertools
import json
import logging
import random
import time

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from dyncp import DCPDataLoader, masks
from dyncp.dataloader import LoaderConfig, loader
from dyncp.dataloader.batching import BatchSelector
from dyncp.dataloader.state import Position, from_state, to_state
from dyncp.samples.source import open_source

pytestmark = pytest.mark.usefixtures("plans_here")

LENGTHS = (5, 9, 3, 12, 1, 7, 4, 8, 2, 6)
SAMPLES = [{"input_ids": [i] * n} for i, n in enumerate(LENGTHS)]


READINGS = itertools.count(1)


def another_order():
    """An order that starts with a different sample on every call."""
    return np.roll(np.arange(len(SAMPLES)), next(READINGS))


def ids(batches):
    return [data["input_ids"][0].tolist() for data, _ in batches]


def make(samples=SAMPLES, **options):
    return DCPDataLoader(samples, masks.causal, **{"tokens_per_batch": 16} | options)


def check_resume(open_loader, epochs=2):
    """Resuming within and between epochs yields the same batches as an uninterrupted run."""
    taken, states = [], []
    with open_loader() as loader:
        for _ in range(epochs):
            for data, _ in loader:
                taken.append(data["input_ids"][0].tolist())
                states.append((len(taken), loader.state_dict()))
            states.append((len(taken), loader.state_dict()))
    after = next(i for i, (_, state) in enumerate(states) if state["position"]["epoch"])
    for before, state in (states[1], states[after], states[after + 2]):
        with open_loader() as loader:
            loader.load_state_dict(copy.deepcopy(state))
            rest = []
            while loader.epoch < epochs:
                epoch = loader.epoch
                rest += ids(loader)
                assert loader.epoch == epoch + 1
        assert rest == taken[before:], f"after {before} batches"


def check_every_position(**make_options):
    """The same for every position, without making plans."""

    def batches(start=None):
        options = {name: option() for name, option in make_options.items()}
        config = LoaderConfig(lengths=LENGTHS, **options)
        budget = None if "batch_sampler" in options else 16
        source = open_source(SAMPLES, config.samples)
        selector = BatchSelector(source, config, budget, 0, 1)
        position, found = start or Position(), []
        while position.epoch < 3:
            for update in selector.updates(source.start(position)):
                found += update.selections
                position = found[-1].end
            position = position.next_epoch(position.epoch + 1)
        return [[e.index for e in s.entries] for s in found], [s.end for s in found]

    whole, ends = batches()
    assert ends[-1].epoch == 2
    for before, end in enumerate(ends, 1):
        state = json.loads(json.dumps(to_state(end, SETTINGS, 1)))
        position = from_state(state, SETTINGS, 1)
        assert batches(position)[0] == whole[before:]


def seeded():
    return torch.Generator().manual_seed(7)


class NumpySampler(Sampler):
    """Shuffles with its own generator, whose state continues from epoch to epoch."""

    def __init__(self, rng):
        self.rng = rng

    def __len__(self):
        return len(SAMPLES)

    def __iter__(self):
        order = list(range(len(SAMPLES)))
        self.rng.shuffle(order)
        return iter(order)


SETTINGS = {"seed": 0, "accumulation_steps": 2, "tokens_per_batch": 16, "lengths": ""}
WEIGHTS = [1.0 + i % 3 for i in range(len(SAMPLES))]


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: RandomSampler(SAMPLES, generator=seeded()),
        lambda: RandomSampler(SAMPLES, replacement=True, num_samples=40, generator=seeded()),
        lambda: RandomSampler(SAMPLES),
        lambda: WeightedRandomSampler(WEIGHTS, 12),
        lambda: WeightedRandomSampler(WEIGHTS, 12, generator=seeded()),
        lambda: NumpySampler(np.random.default_rng(3)),
        lambda: NumpySampler(np.random.RandomState(3)),
        lambda: NumpySampler(random.Random(3)),
        lambda: [3, 1, 4, 1, 5, 9, 2, 6],
    ],
)
def test_samplers_resume_exactly_in_any_epoch(sampler):
    check_every_position(sampler=sampler)


def test_a_loader_resumes_with_a_sampler_that_has_a_generator():
    check_resume(lambda: make(sampler=RandomSampler(SAMPLES, generator=seeded()), lengths=LENGTHS))


def test_batch_samplers_resume_exactly_in_any_epoch():
    def sampler():
        return BatchSampler(RandomSampler(SAMPLES, generator=seeded()), 3, drop_last=False)

    check_every_position(batch_sampler=sampler)


def test_plain_datasets_and_budget_schedules_resume_in_any_epoch():
    check_resume(lambda: make(shuffle=True, tokens_per_batch=lambda n: 16 + n % 3))


def test_asking_for_the_length_does_not_move_a_sampler():
    def order(asks):
        with make(sampler=RandomSampler(SAMPLES, generator=seeded()), lengths=LENGTHS) as loader:
            if asks:
                len(loader)
            return ids(loader) + ids(loader)

    assert order(True) == order(False)


class ForgetfulSampler(Sampler):
    """Has a different order whenever it is iterated, and no state that shows it."""

    def __iter__(self):
        return iter(another_order())


def test_a_sampler_that_cannot_repeat_itself_is_refused():
    with make(sampler=ForgetfulSampler(), lengths=LENGTHS) as loader:
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = loader.state_dict()
    with make(sampler=ForgetfulSampler(), lengths=LENGTHS) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="the sampler ForgetfulSampler does not give the same"):
            list(loader)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"sampler": [0, 1, 2]}, {"sampler": [0, 2, 1]}, "saved with order=list of 3"),
        ({"sampler": [0, 1, 2]}, {}, "saved with order=list of 3"),
        (
            {"sampler": WeightedRandomSampler(WEIGHTS, 10)},
            {"sampler": WeightedRandomSampler(WEIGHTS[::-1], 10)},
            "saved with order=WeightedRandomSampler",
        ),
        ({}, {"drop_last": True}, "saved with drop_last=False, this loader has True"),
        (
            {"tokens_per_batch": lambda _: 16},
            {"tokens_per_batch": lambda n: 16 if n < 9000 else 20},
            "saved with schedule=",
        ),
        ({"tokens_per_batch": lambda _: 16}, {}, "saved with tokens_per_batch=None"),
        ({"tokens_per_batch": np.int64(16)}, {"tokens_per_batch": np.int64(20)}, "per_batch=16"),
        (
            {"lengths": LENGTHS},
            {"samples": [{"input_ids": [i + 1] * n} for i, n in enumerate(LENGTHS)]},
            "saved with dataset=number of samples 10, sample 0 ",
        ),
        (
            {},
            {"samples": [*SAMPLES[:-1], {"input_ids": [9] * 5}]},
            "saved with dataset=number of samples 10, sample 0 ",
        ),
    ],
)
def test_a_state_of_other_options_or_samples_is_refused(before, after, message):
    with make(**before) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(**after) as loader, pytest.raises(ValueError, match=message):
        loader.load_state_dict(state)


def test_the_state_after_a_loop_is_the_start_of_the_next_epoch():
    with make(shuffle=True) as loader:
        whole = [ids(loader) for _ in range(2)]
        state = loader.state_dict()
        third = ids(loader)
    assert state["position"]["epoch"] == 2
    with make(shuffle=True) as loader:
        loader.load_state_dict(state)
        assert loader.epoch == 2
        loader.set_epoch(2)
        assert ids(loader) == third
        assert third not in whole


class Shuffling(IterableDataset):
    """A stream without a state: shuffles in a buffer, by torch's global generator."""

    def __iter__(self):
        buffer = []
        for sample in SAMPLES:
            buffer.append(sample)
            if len(buffer) > 3:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        yield from buffer


class Stateful(IterableDataset):
    """Resumes from a state that plain JSON would not preserve."""

    def __init__(self):
        self.next, self.generator = 0, torch.Generator().manual_seed(3)

    def __iter__(self):
        while self.next < len(SAMPLES):
            self.next += 1
            salt = int(torch.randint(100, (), generator=self.generator))
            yield {"input_ids": [salt, *SAMPLES[self.next - 1]["input_ids"]]}
        self.next = 0

    def state_dict(self):
        return {"next": (self.next, b"x"), 3: self.generator.get_state()}

    def load_state_dict(self, state):
        (self.next, _), random_state = state["next"], state[3]
        self.generator.set_state(random_state)


@pytest.mark.parametrize("stream", [Shuffling, Stateful])
def test_streams_resume_exactly(stream):
    check_resume(lambda: make(stream()))


class Unrepeatable(IterableDataset):
    def __iter__(self):
        return iter([SAMPLES[i] for i in another_order()])


def test_streams_that_cannot_be_read_again_are_refused():
    with make(Unrepeatable()) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(Unrepeatable()) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="the dataset Unrepeatable does not give the same"):
            list(loader)
    with make(SAMPLES[:1].__iter__()) as loader:
        list(loader)
        with pytest.raises(ValueError, match="a list_iterator, which can be iterated only"):
            list(loader)


def test_state_goes_through_torch_distributed_checkpoint(tmp_path):
    with make(Stateful()) as loader:
        batches = iter(loader)
        next(batches)
        checkpoint.save({"loader": loader.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
        expected = ids(batches)
    with make(Stateful()) as loader:
        state = {"loader": loader.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
        loader.load_state_dict(state["loader"])
        assert ids(loader) == expected


def test_a_dataset_state_that_cannot_be_written_is_refused_when_it_is_taken():
    class Odd(Stateful):
        def state_dict(self):
            return {"where": [self.next, object()]}

        def load_state_dict(self, state):
            pass

    with make(Odd()) as loader:
        next(iter(loader))
        with pytest.raises(ValueError, match=r"\['where'\]\[1\] is object; allowed are numbers"):
            loader.state_dict()


class Keeping(Stateful):
    """Has values of many types in its state, and keeps the state that it is given."""

    def state_dict(self):
        values = {"a": (1, [2.5, None]), 4: b"\0", "!": np.arange(3, dtype=np.int16)}
        return super().state_dict() | values | {"t": torch.tensor([1.5, -2.0])}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.loaded = state


def test_states_of_datasets_keep_types_and_nonsense_is_refused():
    with make(Keeping()) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
    stream = Keeping()
    with make(stream) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        for text in ("[" * 100_000, '{"!": "function", "value": 1}'):
            position = state["position"] | {"dataset_state": text}
            with pytest.raises(ValueError, match="cannot be read"):
                loader.load_state_dict(state | {"position": position})
    loaded = stream.loaded
    assert loaded["a"] == (1, [2.5, None])
    assert loaded[4] == b"\0"
    assert loaded["!"].tolist() == [0, 1, 2]
    assert loaded["!"].dtype == np.int16
    assert isinstance(loaded[3], torch.Tensor)
    assert torch.equal(loaded["t"], torch.tensor([1.5, -2.0]))


def test_an_old_iterator_gives_no_batch_and_leaves_the_state_alone():
    with make() as loader:
        old = iter(loader)
        next(old)
        new = iter(loader)
        first = next(new)[0]["input_ids"]
        state = loader.state_dict()
        with pytest.raises(RuntimeError, match="closed: by close"):
            next(old)
        assert loader.state_dict() == state
        loader.load_state_dict(state)
        with pytest.raises(RuntimeError, match="closed: by close"):
            next(new)
        assert [first[0].tolist(), *ids(loader)] == ids(loader)


class Augmenting:
    """Draws from torch's global generator, as datasets do."""

    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, index):
        time.sleep(random.random() / 100)
        return {"input_ids": torch.randint(0, 1000, (LENGTHS[index],))}


def test_one_seed_gives_one_run_whatever_the_training_loop_draws():
    def run(seed):
        torch.manual_seed(11)
        tokens, drawn = [], []
        with make(Augmenting(), seed=seed) as loader:
            for data, _ in loader:
                tokens.append(data["input_ids"][0].tolist())
                drawn.append(torch.rand(3).tolist())
        return tokens, drawn

    assert run(0) == run(0)
    assert run(0) != run(1)
    with make(Augmenting()) as loader:
        assert ids(loader) != ids(loader)  # other epochs augment otherwise
    check_resume(lambda: make(Augmenting(), lengths=LENGTHS, shuffle=True))


def test_a_state_saved_within_an_optimiser_step_is_warned_of_once(caplog):
    samples = [{"input_ids": [1] * 8} for _ in range(5)]
    options = {"tokens_per_batch": 8, "accumulation_steps": 2}
    loader._warn_of_part.cache_clear()
    caplog.set_level(logging.WARNING, logger="dyncp")
    with DCPDataLoader(samples, masks.causal, **options) as batches:
        batches.state_dict()
        for _ in batches:
            if batches.completes_update:  # also after the fifth batch, which ends the epoch
                batches.state_dict()
        state = batches.state_dict()
        batches.load_state_dict(state)
        batches.state_dict()
        assert not caplog.records
        for _ in batches:
            batches.state_dict()
    assert caplog.text.count("saved within an optimiser step") == 1
