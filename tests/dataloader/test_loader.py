"""The loader: batches by a token budget, equal on all ranks."""

import pickle
from functools import partial

import pytest

from dyncp import AttentionShape, Batch, DCPDataLoader, DCPDataloader, Plan, RankPlan, masks
from dyncp.samples import SampleError
from loaders import make_loader
from processes import run_ranks

pytestmark = pytest.mark.usefixtures("plans_here")

SAMPLES = [{"input_ids": [i] * n} for i, n in enumerate((5, 9, 3, 12, 1, 7))]


def ids(loader):
    return [sorted(set(data["input_ids"][0].tolist())) for data, _ in loader]


def test_two_arguments_are_enough():
    (data, plan), *more = make_loader(SAMPLES, masks.causal)
    assert not more
    assert isinstance(plan, RankPlan)
    assert data["input_ids"].shape == (1, 37)
    assert DCPDataloader is DCPDataLoader


def test_batches_are_filled_up_to_the_token_budget():
    options = {"tokens_per_batch": 16}
    assert ids(make_loader(SAMPLES, masks.causal, **options)) == [[0, 2, 4, 5], [1], [3]]
    in_order = [[0, 1], [2, 3, 4], [5]]
    assert ids(make_loader(SAMPLES, masks.causal, window=1, **options)) == in_order
    assert ids(make_loader(SAMPLES, masks.causal, evaluation=True, **options)) == in_order


def test_every_sample_is_seen_once_in_an_order_of_seed_and_epoch():
    loader = make_loader(SAMPLES, masks.causal, tokens_per_batch=16, shuffle=True, seed=3)
    first = ids(loader)
    assert sorted(i for batch in first for i in batch) == list(range(6))
    second = ids(loader)  # the next epoch
    assert second != first
    loader.set_epoch(0)
    assert [ids(loader), ids(loader)] == [first, second]


def test_iterable_datasets_work_in_their_own_order():
    loader = make_loader(iter(SAMPLES), masks.causal, tokens_per_batch=16, window=1)
    assert ids(loader) == [[0, 1], [2, 3, 4], [5]]
    with pytest.raises(ValueError, match="shuffle=True needs"):
        list(make_loader(iter(SAMPLES), masks.causal, shuffle=True))


def test_items_are_counted_over_the_optimiser_step():
    options = {"tokens_per_batch": 16, "accumulation_steps": 2, "window": 1}
    loader = make_loader(SAMPLES, masks.causal, **options)
    items = [int(data["num_items_in_batch"]) for data, _ in loader]
    assert items == [4 + 8 + 2 + 11 + 0] * 2 + [6]


def test_virtual_ranks_yield_whole_plans():
    loader = make_loader(SAMPLES, masks.causal, virtual_ranks=3)
    ((data, plan),) = loader
    assert isinstance(plan, Plan)
    assert data["input_ids"].shape == (1, 37)


def test_masks_may_differ_between_samples_and_have_names():
    def mask_fn(sample):
        length = len(sample["input_ids"])
        own = masks.block_causal(length, chunk=2) if length < 6 else masks.causal(length)
        return {"default": own, "local": masks.sliding_window(length, window=2)}

    ((_, plan),) = make_loader(SAMPLES, mask_fn)
    assert list(plan.masks) == ["default", "local"]


def test_bad_samples_and_mask_functions_are_named_by_index():
    with pytest.raises(ValueError, match="sample 3 has 12 tokens, more than tokens_per_batch=11"):
        list(make_loader(SAMPLES, masks.causal, tokens_per_batch=11))
    with pytest.raises(ValueError, match="the mask of sample 0 is int; expected a Mask"):
        list(make_loader(SAMPLES, lambda _: 1))
    with pytest.raises(ValueError, match="mask of 4 tokens for sample 0, which has 5"):
        list(make_loader(SAMPLES, lambda _: masks.causal(4)))
    with pytest.raises(ValueError, match="accumulation_steps is 0"):
        make_loader(SAMPLES, masks.causal, accumulation_steps=0)


def test_errors_of_samples_can_be_pickled():
    error = pickle.loads(pickle.dumps(SampleError(3, "reading", OSError("disk on fire"))))
    assert isinstance(error, SampleError)
    assert error.index == 3
    assert str(error) == "reading of sample 3 raised OSError: disk on fire"


def test_a_truncated_sample_keeps_the_mask_of_its_first_tokens():
    sample = {"input_ids": list(range(9)), "document_lengths": [3, 4, 2]}
    options = {"max_length": 5, "too_long": "truncate"}
    for mask_fn in (masks.document_packed, partial(masks.document_packed)):
        for more in ({}, {"lengths": [9]}):
            with make_loader([sample], mask_fn, **options, **more) as loader:
                ((data, plan),) = loader
            assert data["input_ids"][0].tolist() == [0, 1, 2, 3, 4]
            assert data["position_ids"][0].tolist() == [0, 1, 2, 0, 1]
            assert data["shift_labels"][0].tolist() == [1, 2, -100, 4, -100]
            expected = Batch.of([masks.document_packed(5, documents=[3, 2])], [0])
            assert plan.fingerprint == expected.fingerprint


def load(rank):
    loader = make_loader(SAMPLES, masks.causal, model=AttentionShape(4, 2, 8), shuffle=True)
    ((data, plan),) = loader
    return plan.rank, plan.digest, data["input_ids"].shape[1]


def test_ranks_get_their_own_parts_of_the_same_plan():
    results = run_ranks(load, 2, planners=True)
    assert [rank for rank, _, _ in results] == [0, 1]
    assert results[0][1] == results[1][1]
    assert results[0][2] + results[1][2] == 37


def test_the_last_batch_of_an_optimiser_step_is_told_also_at_the_end_and_after_resuming():
    options = {"tokens_per_batch": 30, "accumulation_steps": 2, "window": 1, "num_planners": 0}
    samples = [{"input_ids": list(range(20))} for _ in range(5)]
    with make_loader(samples, masks.causal, **options) as loader:
        ends, states, left = [], [], []
        for _ in loader:
            ends.append(loader.completes_update)
            states.append(loader.state_dict())
        assert ends == [False, True, False, True, True]
        for state in states:
            loader.load_state_dict(state)
            left.append(loader.remaining)
        loader.load_state_dict(states[2])
        assert [loader.completes_update for _ in loader] == [True, True]
        assert (left, loader.remaining) == ([4, 3, 2, 1, 0], 5)
