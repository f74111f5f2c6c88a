"""Predicted seconds of training on a sample."""

import pytest

from dyncp import AttentionShape, masks
from dyncp.cost import MODELS, CostModel, find_profile, sample_seconds

MODEL = MODELS["llama3_8b"]
COST = CostModel(find_profile("p4de"), MODEL.attention_shape())


def test_seconds_of_a_sample_follow_its_mask():
    def seconds(mask_fn, length, model=MODEL, forward_only=False):
        return sample_seconds(mask_fn, COST, model, forward_only=forward_only)(length)

    causal = [seconds(masks.causal, length) for length in (1000, 10_000, 100_000)]
    assert causal[1] > 10 * causal[0]
    assert causal[2] > 20 * causal[1]
    local = [seconds(masks.sliding_window(window=512), length) for length in (10_000, 100_000)]
    assert 9.5 * local[0] < local[1] < 10.5 * local[0]
    assert local[1] < causal[2] / 2
    both = masks.named(default=masks.causal, local=masks.sliding_window(window=512))
    assert local[1] < seconds(both, 100_000) < causal[2]
    by_sample = masks.prefix_lm(prefix=lambda sample: sample["prefix"])
    assert seconds(by_sample, 10_000) == seconds(lambda _: None, 10_000) == causal[1]
    assert seconds(masks.causal, 1000, forward_only=True) < causal[0] / 2
    assert seconds(masks.causal, 1000, model=None) == pytest.approx(causal[0], rel=0.1)
    small = CostModel(COST.profile, AttentionShape(8, 2, 64))
    assert sample_seconds(masks.causal, small, None, forward_only=False)(1000) < causal[0] / 10
