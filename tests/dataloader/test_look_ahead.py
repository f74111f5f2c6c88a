"""What the loader reads, plans and reports while it looks ahead; one process."""

import json
import logging
import re
import time

import pytest
import torch
from torch.utils.data import Dataset

from dyncp import AttentionShape, PlannerConfig, masks
from dyncp.cost import ModelConfig
from dyncp.plan import encode_part
from dyncp.planner import tell_usual_decoder
from dyncp.samplers import sample_lengths
from dyncp.topology import preset
from loaders import make_loader

pytestmark = pytest.mark.usefixtures("plans_here")

LENGTHS = (5, 9, 3, 12, 1, 7)


class Counting(Dataset):
    """Remembers which samples were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        self.read.append(index)
        return {"input_ids": [index] * LENGTHS[index], "prefix": 1}


def wait_for_reads(dataset, count):
    end = time.monotonic() + 20
    while len(dataset.read) < count and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    return len(dataset.read)


def test_without_look_ahead_a_batch_is_read_when_it_is_asked_for():
    dataset = Counting()
    options = {"batch_sampler": [[i] for i in range(6)], "look_ahead": 0}
    with make_loader(dataset, masks.causal, **options) as loader:
        for number, _ in enumerate(loader, 1):
            assert wait_for_reads(dataset, number) == number


def test_the_queue_is_bounded_by_the_look_ahead():
    dataset = Counting()
    options = {"batch_sampler": [[i] for i in range(6)], "look_ahead": 2}
    with make_loader(dataset, masks.causal, **options) as loader:
        taken = []
        for data, _ in loader:
            taken.append(int(data["input_ids"][0, 0]))
            assert wait_for_reads(dataset, min(6, len(taken) + 2)) <= len(taken) + 2
    assert taken == list(range(6))
    assert loader.metrics.batches == 6


def test_a_queue_that_runs_low_is_made_longer_up_to_a_bound():
    dataset = Counting()
    options = {"batch_sampler": [[i % 6] for i in range(60)], "look_ahead": 2}
    with make_loader(dataset, masks.causal, **options) as loader:
        iterator = iter(loader)
        for _ in range(40):  # faster than they are planned
            next(iterator)
        assert 40 + 2 < wait_for_reads(dataset, 40 + 8) <= 40 + 8


def test_metrics_say_what_planning_took_and_what_the_plans_are(caplog):
    tell_usual_decoder.cache_clear()
    samples = [{"input_ids": [0] * n} for n in LENGTHS]
    with (
        caplog.at_level(logging.INFO, logger="dyncp"),
        make_loader(
            samples,
            masks.causal,
            virtual_ranks=2,
            tokens_per_batch=16,
            planner=PlannerConfig("bisection"),
        ) as loader,
    ):
        plans = [plan for _, plan in loader]
    snapshot = json.loads(json.dumps(loader.metrics.snapshot()))
    assert snapshot["batches"] == 3
    assert snapshot["solvers"] == {"bisection": 3}
    assert 0 < snapshot["plan_seconds_p50"] <= snapshot["plan_seconds_p99"]
    assert snapshot["stall_seconds"] > 0
    assert snapshot["moved_bytes"] == sum(plans[-1].parts[0].declared_bytes["default"])
    assert snapshot["part_bytes"] == max(len(encode_part(p)) for plan in plans for p in plan.parts)
    assert snapshot["token_imbalance"] >= 1
    assert snapshot["queue_depth"] in range(4)
    lines = [r.getMessage() for r in caplog.records]
    assert any("that of a usual decoder" in line for line in lines)
    line = loader.metrics.line()
    assert re.match(r"plan \d+ ms \(p99 \d+\), stalled .* ready, .* bisection$", line)


def test_evaluation_has_forward_only_plans_in_the_datasets_order():
    samples = [{"input_ids": [i] * n} for i, n in enumerate(LENGTHS)]
    options = {"evaluation": True, "tokens_per_batch": 16, "local_multiple": 8}
    with make_loader(samples, masks.causal, lengths=LENGTHS, **options) as loader:
        assert len(loader) == 3
        batches = list(loader)
    assert [sorted(set(d["input_ids"][0].tolist()) - {0}) for d, _ in batches] == [
        [1], [2, 3, 4], [5],
    ]  # fmt: skip
    assert all(plan.masks["default"].backward is None for _, plan in batches)
    assert [d["input_ids"].shape[1] for d, _ in batches] == [16, 16, 8]
    assert batches[2][0]["shift_labels"][0, -1] == -100


def test_the_length_of_a_loader_needs_the_lengths_of_its_samples():
    loader = make_loader(Counting(), masks.causal)
    with pytest.raises(TypeError, match="pass lengths= "):
        len(loader)
    dataset = Counting()
    sampled = {"batch_sampler": [[0], [1, 2], [3]], "accumulation_steps": 2}
    assert len(make_loader(dataset, masks.causal, **sampled)) == 3
    assert len(make_loader(dataset, masks.causal, drop_last=True, **sampled)) == 2
    assert not dataset.read


def test_no_rank_gets_more_tokens_than_allowed():
    samples = [{"input_ids": [0] * n} for n in (64, 8, 8, 8, 8)]
    options = {
        "virtual_ranks": 4,
        "planner": PlannerConfig(block_size=4, max_tokens_per_rank=26),
    }
    with make_loader(samples, masks.causal, **options) as loader:
        ((_, plan),) = loader
    assert plan.parts[0].tokens_per_rank.max() <= 26
    assert loader.metrics.static_plans == 0
    with pytest.raises(ValueError, match="tokens_per_batch is 200, but 4 ranks with max_tokens"):
        make_loader(samples, masks.causal, tokens_per_batch=200, **options)


def test_a_model_says_its_shape_in_many_ways():
    sizes = ModelConfig(64, 2, 128, 100, 8, 2, 16)
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
              "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
              "vocab_size": 100, "torch_dtype": "float16"}  # fmt: skip

    class TransformersConfig:
        def to_dict(self):
            return config

    class TransformersModel(torch.nn.Linear):
        config = TransformersConfig()

    class OwnModel(torch.nn.Linear):
        config = sizes

    def shape(model):
        samples = [{"input_ids": [0] * 4}]
        with make_loader(samples, masks.causal, model=model) as loader:
            return loader.shape

    model = TransformersModel(2, 2, dtype=torch.bfloat16)
    assert shape(None) == AttentionShape.assumed()
    assert shape(sizes) == shape(model) == AttentionShape(8, 2, 16, "bf16")
    assert shape(config) == shape(TransformersConfig()) == AttentionShape(8, 2, 16, "fp16")
    for dtype in ("fp32", torch.float32):
        assert shape(ModelConfig.of(model, dtype)).dtype == "fp32"
    assert shape(OwnModel(2, 2)) == AttentionShape(8, 2, 16, "fp32")
    with pytest.raises(ValueError, match="model is int; expected an AttentionShape, a Mod"):
        shape(3)


@pytest.mark.parametrize("sample", ["ldc", "single", "training_documents"])
def test_a_ranks_part_of_a_large_batch_is_small(sample):
    lengths = sample_lengths(sample, 131_072)
    samples = [{"input_ids": torch.zeros(n, dtype=torch.int64)} for n in lengths]
    with make_loader(
        samples,
        masks.causal,
        model=AttentionShape(8, 2, 128),
        virtual_ranks=32,
        topology=preset("p4de", 4),
        tokens_per_batch=131_072,
    ) as loader:
        ((_, plan),) = loader
    assert plan.num_ranks == 32
    assert 0 < loader.metrics.last.part_bytes < 256 * 1024


def test_static_plans_keep_the_planners_limits_in_mind():
    options = {
        "virtual_ranks": 2,
        # It fails: the model's heads are not known.
        "planner": PlannerConfig(head_groups=2, max_tokens_per_rank=5),
    }
    with (
        make_loader([{"input_ids": [0]}] * 8, masks.causal, **options) as loader,
        pytest.raises(ValueError, match=r"the static plan assigns \d tokens to a rank"),
    ):
        list(loader)
