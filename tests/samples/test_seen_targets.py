"""Targets that tokens can see: left out, or refused; and labels of a token's own place."""

import pytest
import torch

from dyncp import Batch, DCPDataLoader, Topology, make_local_data, masks, plan_batch
from dyncp.samples import NO_TARGET

pytestmark = pytest.mark.usefixtures("plans_here")

IDS = [10, 11, 12, 13, 14, 15, 16, 17]
BOTH = masks.global_sliding(num_global=1, window=2, causal=False)
SUMMARY = masks.from_mask_mod(lambda _b, _h, q, k: (q >= k) | (q == 0))


def targets_of(sample, mask, **options):
    """What each token predicts, and the number of targets; the same from loader and batch."""
    with DCPDataLoader([sample], mask, **options) as loader:
        ((data, _),) = loader
    batch = Batch.of([mask(sample)])
    own = make_local_data([sample], batch, plan_batch(batch, Topology()))
    assert torch.equal(own["shift_labels"], data["shift_labels"])
    assert own["num_items_in_batch"] == data["num_items_in_batch"]
    return data["shift_labels"][0].tolist(), int(data["num_items_in_batch"])


def test_tokens_that_see_their_target_have_none():
    none = NO_TARGET
    prefix = masks.prefix_lm(prefix=4)
    assert targets_of({"input_ids": IDS}, prefix) == ([none] * 3 + IDS[4:] + [none], 4)
    chunks = masks.block_causal(chunk=4)
    expected = [none] * 3 + [14] + [none] * 4
    assert targets_of({"input_ids": IDS}, chunks) == (expected, 1)
    named = masks.named(default=masks.causal, local=prefix)
    with DCPDataLoader([{"input_ids": IDS}], named) as loader:
        ((data, _),) = loader
    assert data["shift_labels"][0].tolist() == [none] * 3 + IDS[4:] + [none]


def test_a_tree_leaves_out_the_branches_that_a_token_sees():
    tree = masks.prefix_tree(parents=[-1, 0, 0], lengths=[2, 3, 3])
    sample = {"input_ids": IDS}

    def mask(sample):  # the prompt also sees the first token of the first answer
        found = tree(sample)
        ranges = found.ranges.copy()
        ranges[1, 0] = [0, 3]
        return masks.Mask(ranges, found.positions, found.targets, branches=found.branches)

    batch = Batch.of([mask(sample)])
    data = make_local_data([sample], batch, plan_batch(batch, Topology()))
    pairs = zip(data["target_rows"][0].tolist(), data["target_labels"][0].tolist(), strict=True)
    assert list(pairs) == [(0, 11), (1, 15), (2, 13), (3, 14), (5, 16), (6, 17)]


@pytest.mark.parametrize(
    "mask", [masks.full, BOTH, SUMMARY, masks.document_packed(documents=[5, 3], causal=False)]
)
@pytest.mark.parametrize("options", [{}, {"max_length": 6, "too_long": "split"}])
def test_a_sample_that_loses_all_targets_is_named(mask, options):
    samples = [{"input_ids": [1]}, {"input_ids": IDS}]
    chosen = [masks.causal, mask]

    def mask_fn(sample):
        return chosen[len(sample["input_ids"]) > 1](sample)

    with pytest.raises(ValueError, match=r"sample 1 under .* none is left to train on; if input_i"):
        list(DCPDataLoader(samples, mask_fn, **options))
    batch = Batch.of([mask_fn(sample) for sample in samples])
    with pytest.raises(ValueError, match="none is left to train on"):
        make_local_data(samples, batch, plan_batch(batch, Topology()))


def test_pieces_that_have_no_targets_of_a_sample_that_has_some_are_trained_without():
    mask = masks.prefix_lm(prefix=6)
    options = {"max_length": 4, "too_long": "split", "tokens_per_batch": 4}
    with DCPDataLoader([{"input_ids": IDS}], mask, **options) as loader:
        found = [data["shift_labels"][0].tolist() for data, _ in loader]
    assert found == [[NO_TARGET] * 4, [NO_TARGET, 16, 17, NO_TARGET]]


def test_labels_that_tokens_see_are_refused_and_others_are_not():
    mask = masks.prefix_lm(prefix=4)
    with pytest.raises(ValueError, match=r"sample 0 .* token 0 attends what it is to predict, tok"):
        targets_of({"input_ids": IDS, "labels": IDS}, mask)
    with pytest.raises(ValueError, match="token 2 attends what it is to predict, token 3"):
        targets_of({"input_ids": IDS, "labels": [NO_TARGET] * 3 + IDS[3:]}, mask)
    labels = [NO_TARGET] * 4 + IDS[4:]
    assert targets_of({"input_ids": IDS, "labels": labels}, mask)[1] == 4


def test_a_loss_without_targets_may_use_any_mask():
    labels = [NO_TARGET] * len(IDS)
    assert targets_of({"input_ids": IDS, "labels": labels}, masks.full) == (labels, 1)


def test_masked_language_training_has_labels_of_its_own_place():
    mask, hidden = masks.own_labels(masks.full), [10, 0, 12, 13, 0, 15, 16, 17]
    labels = [NO_TARGET, 11, NO_TARGET, NO_TARGET, 14, NO_TARGET, 16, NO_TARGET]
    assert targets_of({"input_ids": hidden, "labels": labels}, mask) == (labels, 3)
    with pytest.raises(ValueError, match="labels of their own place, but the sample has no labels"):
        targets_of({"input_ids": hidden}, mask)
    with pytest.raises(ValueError, match="its labels equal its input_ids"):
        targets_of({"input_ids": IDS, "labels": IDS}, mask)


def test_explicit_targets_that_tokens_see_count_as_seen():
    def backwards(sample):
        length = len(sample["input_ids"])
        return masks.Mask(masks.causal(length).ranges, targets=[-1, *range(length - 1)])

    with pytest.raises(ValueError, match="none is left to train on"):
        targets_of({"input_ids": IDS}, backwards)


def test_local_data_with_several_targets_per_token_have_no_shift_labels():
    tree = {"input_ids": IDS, "parents": [-1, 0, 0], "node_lengths": [2, 3, 3]}
    with DCPDataLoader([tree], masks.prefix_tree) as loader:
        ((data, _),) = loader
    with pytest.raises(ValueError, match="no shift_labels, because tokens have several targets"):
        data["shift_labels"]
    with pytest.raises(KeyError, match="weather"):
        data["weather"]
    samples = [{"input_ids": IDS}, tree]
    batch = Batch.of([masks.causal(8), masks.prefix_tree(tree)])
    plan = plan_batch(batch, Topology(1, 2))
    for part in plan.parts:  # also the rank that only has the plain sample
        own = make_local_data(samples, batch, part)
        assert "shift_labels" not in own
        assert "target_rows" in own
