"""Batches are filled from a window of samples, and dealt so that replicas take equally long."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from dyncp.cost import MODELS, CostModel, find_profile, sample_seconds
from dyncp.dataloader.batching import BatchSelector, balanced_round, best_subset
from dyncp.dataloader.state import Position
from dyncp.samplers import find_distribution
from dyncp.samples.source import open_source
from loaders import make_config
from sizes import draws

BUDGET = 32_768
MODEL = MODELS["llama3_8b"]
COST = CostModel(find_profile("p4de"), MODEL.attention_shape())


def drawn(name, count, budget=BUDGET):
    draw, rng = find_distribution(name), np.random.default_rng(0)
    return [min(draw(rng, budget), budget) for _ in range(count)]


def fill(lengths, budget, window=16):
    config = make_config(lengths=lengths, tokens_per_batch=budget, window=window)
    source = open_source([None] * len(lengths), config.samples)
    found = BatchSelector(source, config, budget, 0, 1).rounds(Position())
    return [batch for (batch,), _ in found]


def rounds(lengths, replicas, budget=BUDGET, **options):
    """The seconds that each replica takes for its batch, round by round."""
    config = make_config(lengths=lengths, tokens_per_batch=budget, **options)
    source = open_source([None] * len(lengths), config.samples)
    seconds = sample_seconds(masks.causal, COST, MODEL, forward_only=False)
    own = [
        [
            sum(seconds(entry.length) for entry in selection.entries)
            for update in BatchSelector(source, config, budget, r, replicas, seconds).updates(
                Position()
            )
            for selection in update.selections
            if not selection.filler
        ]
        for r in range(replicas)
    ]
    return list(zip(*own, strict=False))


@draws(100)
@given(lengths=st.lists(st.integers(1, 30), max_size=9), room=st.integers(1, 60))
def test_the_best_subset_is_that_of_all_subsets(lengths, room):
    chosen = best_subset(lengths, room, room)
    sums = {sum(c) for n in range(len(lengths) + 1) for c in combinations(lengths, n)}
    assert sum(lengths[number] for number in chosen) == max(s for s in sums if s <= room)
    assert len(set(chosen)) == len(chosen)


def test_large_rooms_are_filled_to_a_fraction_without_overflowing():
    lengths = [3_000_001, 2_999_999, 1_500_000, 498_000]
    chosen = best_subset(lengths, 8_000_000, 8_000_000)
    used = sum(lengths[number] for number in chosen)
    assert 7_997_000 < used <= 8_000_000


def test_the_oldest_sample_opens_the_next_batch():
    batches = fill([6, 7, 8, 9, 4, 3, 2, 1], 10)
    assert [[entry.number for entry in batch.entries] for batch in batches] == [
        [0, 4], [1, 5], [2, 6], [3, 7],
    ]  # fmt: skip
    assert [batch.full for batch in batches] == [True, True, True, True]
    assert [batch.after.samples for batch in batches] == [1, 2, 3, 8]
    assert batches[0].after.taken == ((4, 0),)


def test_samples_that_fit_together_stay_together():
    lengths = [3, 90, 5, 1, 1]
    assert [len(batch.entries) for batch in fill(lengths, 100)] == [5]
    assert [len(batch.entries) for batch in fill(lengths, 1000)] == [5]


def test_the_window_bounds_what_is_looked_at():
    lengths = [60] * 12 + [40]
    first = {window: len(fill(lengths, 100, window)[0].entries) for window in (1, 4, 16)}
    assert first == {1: 1, 4: 1, 16: 2}


@pytest.mark.parametrize(
    ("name", "budget"), [("ldc", 32_768), ("longalign", 131_072), ("training_documents", 65_536)]
)
def test_batches_are_at_least_97_percent_full(name, budget):
    lengths = drawn(name, 3000, budget)
    batches = fill(lengths, budget)
    assert sorted(entry.number for batch in batches for entry in batch.entries) == list(range(3000))
    assert all(sum(entry.length for entry in batch.entries) <= budget for batch in batches)
    assert sum(lengths) > 0.97 * budget * len(batches)
    assert sum(lengths) < 0.93 * budget * len(fill(lengths, budget, 1))  # in order


def test_samples_wait_for_few_batches():
    batches = fill(drawn("ldc", 3000), BUDGET)
    ages = [batch.entries[0].number for batch in batches]
    assert ages == sorted(ages)
    in_order = fill(drawn("ldc", 3000), BUDGET, 1)
    batch_of = {e.number: number for number, b in enumerate(in_order) for e in b.entries}
    late = [number - batch_of[e.number] for number, b in enumerate(batches) for e in b.entries]
    assert max(late) <= 16


def test_a_round_has_the_oldest_batch_and_those_that_leave_the_least_time_idle():
    assert balanced_round([4, 9, 5, 4, 8, 5], 3) == [0, 2, 3]
    assert balanced_round([9, 5, 8, 5], 2) == [0, 2]
    assert balanced_round([5, 1, 9], 2) == [0, 1]
    assert balanced_round([5, 1], 3) == [0, 1]
    assert balanced_round([2.0], 1) == [0]


def test_replicas_take_equally_long():
    lengths = drawn("ldc", 6000)
    level, before = rounds(lengths, 8), rounds(lengths, 8, window=1)
    ratio, ratio_before = (
        sum(max(r) for r in found) / sum(sum(r) / len(r) for r in found)
        for found in (level, before)
    )
    assert ratio < 1.03
    assert ratio_before > 1.3
