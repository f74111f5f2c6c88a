"""What the loader reads, plans and reports while it looks ahead; one process."""

import json
import logging
import struct
import time

import pytest
import torch
from torch.utils.data import Dataset

from dyncp import AttentionShape, Batch, DCPDataLoader, PlannerConfig, masks, plan_batch
from dyncp.cost import ModelConfig
from dyncp.dataloader.batching import SelectedBatch, SelectedStep
from dyncp.dataloader.dataset import SampleEntry, open_source
from dyncp.dataloader.decision import PlanExchange
from dyncp.dataloader.options import LoaderConfig
from dyncp.dataloader.peers import Peers
from dyncp.dataloader.planning import BatchPlanner
from dyncp.dataloader.prepare import BatchData, BatchPreparer, LoaderContext, MaskMaker
from dyncp.dataloader.ranks import BatchMismatch, LoaderRanks, PeerError, Store, chunk_keys
from dyncp.dataloader.state import Position
from dyncp.plan import PlanDecodeError, encode_part
from dyncp.plan.codec import decode_body
from dyncp.planner.process import Closed, PlanReply
from dyncp.samplers import sample_lengths
from dyncp.topology import Topology, preset

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
    with DCPDataLoader(dataset, masks.causal, **options) as loader:
        for number, _ in enumerate(loader, 1):
            assert wait_for_reads(dataset, number) == number


def test_the_queue_is_bounded_by_the_look_ahead():
    dataset = Counting()
    options = {"batch_sampler": [[i] for i in range(6)], "look_ahead": 2}
    with DCPDataLoader(dataset, masks.causal, **options) as loader:
        taken = []
        for data, _ in loader:
            taken.append(int(data["input_ids"][0, 0]))
            assert wait_for_reads(dataset, min(6, len(taken) + 2)) <= len(taken) + 2
    assert taken == list(range(6))
    assert loader.metrics.batches == 6


def test_a_queue_that_runs_low_is_made_longer_up_to_a_bound():
    dataset = Counting()
    options = {"batch_sampler": [[i % 6] for i in range(60)], "look_ahead": 2}
    with DCPDataLoader(dataset, masks.causal, **options) as loader:
        iterator = iter(loader)
        for _ in range(40):  # faster than they are planned
            next(iterator)
        assert 40 + 2 < wait_for_reads(dataset, 40 + 8) <= 40 + 8


def test_metrics_say_what_planning_took_and_what_the_plans_are(caplog):
    samples = [{"input_ids": [0] * n} for n in LENGTHS]
    with (
        caplog.at_level(logging.INFO, logger="dyncp"),
        DCPDataLoader(
            samples,
            masks.causal,
            virtual_ranks=2,
            tokens_per_batch=16,
            log_every=2,
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
    assert any("assume 4 q heads per kv head" in line for line in lines)
    assert sum(line.startswith("batch 2: plan ") for line in lines) == 1


def test_evaluation_has_forward_only_plans_in_the_datasets_order():
    samples = [{"input_ids": [i] * n} for i, n in enumerate(LENGTHS)]
    options = {"evaluation": True, "tokens_per_batch": 16, "local_multiple": 8}
    with DCPDataLoader(samples, masks.causal, lengths=LENGTHS, **options) as loader:
        assert len(loader) == 3
        batches = list(loader)
    assert [sorted(set(d["input_ids"][0].tolist()) - {0}) for d, _ in batches] == [
        [1], [2, 3, 4], [5],
    ]  # fmt: skip
    assert all(plan.masks["default"].backward is None for _, plan in batches)
    assert [d["input_ids"].shape[1] for d, _ in batches] == [16, 16, 8]
    assert batches[2][0]["shift_labels"][0, -1] == -100


def test_the_length_of_a_loader_needs_the_lengths_of_its_samples():
    loader = DCPDataLoader(Counting(), masks.causal)
    with pytest.raises(TypeError, match="pass lengths= "):
        len(loader)
    dataset = Counting()
    sampled = {"batch_sampler": [[0], [1, 2], [3]], "accumulation_steps": 2}
    assert len(DCPDataLoader(dataset, masks.causal, **sampled)) == 3
    assert len(DCPDataLoader(dataset, masks.causal, drop_last=True, **sampled)) == 2
    assert not dataset.read


def test_no_rank_gets_more_tokens_than_allowed():
    samples = [{"input_ids": [0] * n} for n in (64, 8, 8, 8, 8)]
    options = {
        "virtual_ranks": 4,
        "max_tokens_per_rank": 26,
        "planner": PlannerConfig(block_size=4),
    }
    with DCPDataLoader(samples, masks.causal, **options) as loader:
        ((_, plan),) = loader
    assert plan.parts[0].tokens_per_rank.max() <= 26
    assert loader.metrics.static_plans == 0
    with pytest.raises(ValueError, match="tokens_per_batch is 200, but 4 ranks with max_tokens"):
        DCPDataLoader(samples, masks.causal, tokens_per_batch=200, **options)


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

    def shape(model, dtype=None):
        samples = [{"input_ids": [0] * 4}]
        with DCPDataLoader(samples, masks.causal, model=model, dtype=dtype) as loader:
            return loader.shape

    model = TransformersModel(2, 2, dtype=torch.bfloat16)
    assert shape(None) == AttentionShape.assumed()
    assert shape(sizes) == shape(model) == AttentionShape(8, 2, 16, "bf16")
    assert shape(config) == shape(TransformersConfig()) == AttentionShape(8, 2, 16, "fp16")
    for dtype in ("fp32", torch.float32):
        assert shape(model, dtype).dtype == shape(None, dtype).dtype == "fp32"
    assert shape(OwnModel(2, 2)) == AttentionShape(8, 2, 16, "fp32")
    with pytest.raises(ValueError, match="model is int; expected an AttentionShape, a Mod"):
        shape(3)


@pytest.mark.parametrize("sample", ["ldc", "single", "training_documents"])
def test_a_ranks_part_of_a_large_batch_is_small(sample):
    lengths = sample_lengths(sample, 131_072)
    samples = [{"input_ids": torch.zeros(n, dtype=torch.int64)} for n in lengths]
    with DCPDataLoader(
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


RANKS = [LoaderRanks(rank, 2, rank, 2) for rank in range(2)]
SELECTION = SelectedBatch(3, (SampleEntry(0, 4, 10), SampleEntry(1, 7, 2)), Position(batches=4))
REPLY = PlanReply((b"part of 0", b"part of 1"), "d1", "f1", 6, 0.1)


def join(store, ranks, stalled=0.0, closing=False):
    """A rank's exchange, and its view of its peers."""
    peers = Peers(store, ranks, (1.0, 1.0))
    peers.asked_at, peers.closing = time.perf_counter() - stalled, closing
    return PlanExchange(peers), peers


def exchanges(stalled=0.0):
    store = Store()
    return store, [join(store, ranks, stalled)[0] for ranks in RANKS]


def both_peers(stalled=0.0):
    store = Store()
    return zip(*(join(store, ranks, stalled) for ranks in RANKS), strict=True)


def test_the_first_decision_counts_and_the_last_member_deletes_the_keys():
    store, (first, second) = exchanges()
    first.decide_static(SELECTION, "the planner raised")
    second.publish(SELECTION, REPLY)  # too late
    for exchange in (first, second):
        decision = exchange.decision(3, SELECTION)
        assert decision.static
        assert decision.reason == "the planner raised"
        exchange.check_static(SELECTION, "d2")
        exchange.leave(SELECTION, decision)
    assert not store.list_keys()
    second.publish(SELECTION, REPLY)  # even later: nobody would delete it
    assert not store.list_keys()


def test_a_rank_that_hears_of_no_plan_decides_for_all():
    _, (_, second) = exchanges(stalled=100.0)
    decision = second.decision(3, SELECTION)
    assert decision.static
    assert decision.reason == "rank 1 heard nothing of a plan for 11 s"


def test_parts_travel_in_chunks(monkeypatch):
    monkeypatch.setattr("dyncp.dataloader.ranks.CHUNK_BYTES", 4)
    store, (first, second) = exchanges()
    first.publish(SELECTION, REPLY)
    assert chunk_keys("part/1", 9) == ["part/1", "part/1/1", "part/1/2"]
    assert sum("part/1" in key for key in store.list_keys()) == 3
    decision = second.decision(3, SELECTION)
    assert second.part(SELECTION, decision, 1) == b"part of 1"
    for exchange in (first, second):
        exchange.leave(SELECTION, decision)
    assert not store.list_keys()


def test_parts_of_another_rank_or_plan_are_refused():
    plan, other = (plan_batch(Batch.of([masks.causal(n)], [0]), Topology(1, 2)) for n in (40, 41))
    selection = SelectedBatch(3, (SampleEntry(0, 0, 40, whole=40),), Position(batches=4))
    config = LoaderConfig(lengths=[40])
    source = open_source([{"input_ids": [0] * 40}], config)
    for parts in (plan.parts[::-1], other.parts):
        _, (first, second) = exchanges()
        encoded = tuple(encode_part(part) for part in parts)
        reply = PlanReply(encoded, plan.digest, plan.fingerprint, 20, 0.1)
        first.publish(selection, reply)
        context = LoaderContext(config, RANKS[1], source, MaskMaker(masks.causal), None)
        preparer, batch = BatchPreparer(context, second), BatchData(context, selection)
        with pytest.raises(
            PeerError, match=r"part of another plan: rank \d of 2, .*; expected rank"
        ):
            preparer.prepare(3, batch)


def test_texts_in_the_store_that_cannot_be_read_are_refused():
    deep = b"[" * 100_000
    for text in (deep, b"\xff", b"[]", b"{}", b'{"samples": 3}', b"3"):
        store, (first, _) = exchanges()
        store.set_bytes("r0/b3/decision", text)
        with pytest.raises(PeerError, match="the store has "):
            first.decision(3, SELECTION)
    with pytest.raises(PlanDecodeError, match="plan part is malformed"):
        decode_body(struct.pack("<I", len(deep)) + deep, "00" * 16)


def test_disagreements_have_both_fingerprints_and_reach_all_ranks():
    store = Store()
    (first, first_peers), (second, second_peers) = (join(store, ranks) for ranks in RANKS)
    first.publish(SELECTION, REPLY)
    other = SelectedBatch(3, (SampleEntry(0, 5, 10),), Position(batches=4))
    with pytest.raises(BatchMismatch) as caught:
        second.decision(3, other)
    text = str(caught.value)
    assert text.startswith("ranks disagree on batch 3: rank 0 planned batch ")
    assert SELECTION.fingerprint in text
    assert other.fingerprint in text
    with pytest.raises(BatchMismatch, match="rank 0 planned batch"):
        first.decision(4, SelectedBatch(4, SELECTION.entries, Position()))
    for peers in (first_peers, second_peers):
        peers.close()
    assert not store.list_keys()


def test_replicas_that_deal_differently_are_noticed():
    store = Store()
    ranks = [LoaderRanks(0, 1, replica=replica, num_replicas=2) for replica in (0, 1)]
    (first, first_peers), (second, second_peers) = (join(store, own) for own in ranks)
    first.add_targets(SelectedStep(0, (SELECTION,), None, "f1"), 5)
    with pytest.raises(BatchMismatch, match="dealt the batches of step 0 differently: the first h"):
        second.add_targets(SelectedStep(0, (SELECTION,), None, "f2"), 5)
    with pytest.raises(BatchMismatch, match="rank 1 of replica 1 has f2"):
        first.total_targets(SelectedStep(0, (SELECTION,), None, "f1"))
    for peers in (first_peers, second_peers):
        peers.close()
    assert not store.list_keys()


def test_other_failures_are_passed_on_once_and_closing_ends_waits():
    (_, second), (first_peers, second_peers) = both_peers()
    first_peers.tell_failure(ValueError("sample 3 is empty"))
    second_peers.tell_failure(PeerError("rank 0 failed"))
    with pytest.raises(PeerError, match="rank 0 failed: ValueError: sample 3 is empty"):
        second.decision(3, SELECTION)
    closing, _ = join(Store(), RANKS[0], closing=True)
    with pytest.raises(Closed):
        closing.decision(3, SELECTION)


def test_an_epoch_of_another_length_is_noticed():
    (_, second), (first_peers, _) = both_peers()
    first_peers.end_epoch(3)
    with pytest.raises(BatchMismatch, match="rank 1 is at batch 3, another rank has 3 batches"):
        second.decision(3, SELECTION)
    _, (first_peers, second_peers) = both_peers()
    first_peers.end_epoch(3)
    with pytest.raises(BatchMismatch, match="rank 1 has 4 batches, another rank 3"):
        second_peers.end_epoch(4)


def test_ranks_that_never_come_to_an_agreement_are_named():
    (first, _), (_, second_peers) = both_peers(stalled=100.0)
    step = SelectedStep(0, (SELECTION,), None)
    first.add_targets(step, 5)
    with pytest.raises(
        PeerError, match="rank 0 waited 2 s for all ranks to agree on step 0: rank 1 has not begun"
    ):
        first.total_targets(step)
    second_peers.end_epoch(1)
    with pytest.raises(PeerError, match="rank 0 waited 2 s"):  # which gave up, and said why
        second_peers.wait_for_all_ends()
    _, (_, second_peers) = both_peers(stalled=100.0)
    second_peers.end_epoch(1)
    with pytest.raises(PeerError, match="rank 1 waited 2 s for all ranks to end the epoch: rank 0"):
        second_peers.wait_for_all_ends()


def test_static_plans_keep_the_planners_limits_in_mind():
    config = PlannerConfig(max_tokens_per_rank=3)
    planner = BatchPlanner(plan_batch, Topology(1, 2), AttentionShape(), config)
    with pytest.raises(ValueError, match=r"the static plan assigns \d tokens to a rank"):
        planner.static_plan(Batch.of([masks.causal(9)]))
