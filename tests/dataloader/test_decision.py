"""How ranks agree on the plan of a batch through the store: two ranks in one process."""

import struct
import time

import pytest

from dyncp import Batch, BatchMismatch, PeerError, Topology, masks, plan_batch
from dyncp.dataloader import LoaderConfig
from dyncp.dataloader.batching import SelectedBatch, SelectedStep
from dyncp.dataloader.dataset import SampleEntry, open_source
from dyncp.dataloader.decision import PlanExchange
from dyncp.dataloader.peers import Peers
from dyncp.dataloader.prepare import BatchData, BatchPreparer, LoaderContext, MaskMaker
from dyncp.dataloader.ranks import LoaderRanks, Store, chunk_keys
from dyncp.dataloader.state import Position
from dyncp.plan import PlanDecodeError, encode_part
from dyncp.plan.codec import decode_body
from dyncp.planner.process import Closed, PlanReply

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
    assert decision.reason == "rank 1 got no plan within 11 s"


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
        PeerError,
        match="rank 0 waited 2 s for all ranks to agree on step 0: rank 1 has not started",
    ):
        first.total_targets(step)
    second_peers.end_epoch(1)
    with pytest.raises(PeerError, match="rank 0 waited 2 s"):  # which gave up, and said why
        second_peers.wait_for_all_ends()
    _, (_, second_peers) = both_peers(stalled=100.0)
    second_peers.end_epoch(1)
    with pytest.raises(PeerError, match="rank 1 waited 2 s for all ranks to end the epoch: rank 0"):
        second_peers.wait_for_all_ends()
