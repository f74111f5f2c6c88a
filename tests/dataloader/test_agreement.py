"""How ranks agree: records are compared by one function; two ranks in one process, one store."""

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from dyncp import Batch, BatchMismatch, PeerError, StoreError, Topology, masks, plan_batch
from dyncp.dataloader import LoaderConfig, patience
from dyncp.dataloader.agreement import Agreement, Alone, disagreement
from dyncp.dataloader.batching import SelectedBatch
from dyncp.dataloader.peers import Peers, TrainingProgress
from dyncp.dataloader.prepare import BatchData, BatchPreparer, LoaderContext, MaskMaker
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.dataloader.state import Position
from dyncp.dataloader.store import SharedStore
from dyncp.plan import PlanDecodeError
from dyncp.plan.codec import decode_body
from dyncp.planner.process import Closed
from dyncp.samples.source import SampleEntry, open_source
from processes import wait_until

RANKS = [LoaderRanks(rank, 2, rank, 2) for rank in range(2)]
REPLICAS = [LoaderRanks(0, 1, replica=replica, num_replicas=2) for replica in (0, 1)]
SELECTION = SelectedBatch(2, (SampleEntry(0, 4, 10), SampleEntry(1, 7, 2)), Position(batches=4))
OTHER = SelectedBatch(2, (SampleEntry(0, 5, 12),), Position(batches=4))
ABOUT = {"seconds": 0.1, "static_because": ""}


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextmanager
def agreements(store, ranks=RANKS):
    """The agreements of two ranks in their first iteration, which they leave in the end."""
    peers = [
        Peers(SharedStore(store, "dyncp", own.process, 20), own, TrainingProgress(own.name(), 1))
        for own in ranks
    ]
    made = [Agreement(one, one.progress) for one in peers]
    try:
        yield made
    finally:
        each(lambda one: one.leave(), made)
        for one in reversed(peers):  # rank 0 waits for the others
            one.close()


def each(act, made):
    """The results of `act` on all ranks at the same time; errors are results."""

    def outcome(one):
        try:
            return act(one)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(outcome, made))


def has_verdict(store):
    return any(key.endswith("verdict") for key in store.list_keys())


def update(selection=SELECTION, digests=None, targets=0, fingerprint="", plan="p"):
    """A rank's record of an update with one batch."""
    batch = {"samples": selection.fingerprint, "about": str(selection)}
    batch |= {"plan": plan, "digests": digests or {}}
    number = selection.number
    return {
        "update": fingerprint or selection.fingerprint,
        "last": number,
        "targets": targets,
        "batches": {str(number): batch},
    }


def test_a_verdict_has_the_targets_of_all_ranks_and_no_key_stays(store):
    with agreements(store) as made:
        assert each(lambda one: one.conclude({"start": {}})["targets"], made) == [0, 0]
        for targets in (5, 7):
            found = each(lambda one, n=targets: one.conclude(update(targets=n))["targets"], made)
            assert found == [2 * targets] * 2
        verdicts = each(lambda one: one.conclude({"end": 3}), made)
        assert [verdict["over"] for verdict in verdicts] == [True, True]
    assert not [key for key in store.list_keys() if "dyncp" in key]


def test_parts_travel_in_chunks_and_go_when_all_have_read_them(store, monkeypatch):
    monkeypatch.setattr("dyncp.dataloader.store.CHUNK_BYTES", 4)
    with agreements(store) as made:
        made[0].publish(SELECTION, (b"part of 0", b"part of 1"), ABOUT)
        assert sum("plan" in key for key in store.list_keys()) == 3
        assert made[1].part(SELECTION) == (ABOUT, b"part of 1")
        each(lambda one: one.conclude(update()), made)
        assert not sum("plan" in key for key in store.list_keys())


def test_a_rank_with_another_batch_gets_no_part_and_both_get_both_descriptions(store):
    with agreements(store) as made:
        made[0].publish(SELECTION, (b"part of 0", b"part of 1"), ABOUT)
        assert made[1].part(OTHER) is None
        own = {0: SELECTION, 1: OTHER}
        errors = each(lambda one: one.conclude(update(own[made.index(one)])), made)
    assert {type(error) for error in errors} == {BatchMismatch}
    assert str(errors[0]) == str(errors[1])
    for text in (f"{SELECTION} on rank 0", f"{OTHER} on rank 1", "disagree on batch 2"):
        assert text in str(errors[0])


def test_a_rank_that_waits_for_a_part_hears_that_its_planner_has_other_batches(store):
    with agreements(store) as made:
        waiting = threading.Thread(target=lambda: parts.append(made[1].part(SELECTION)))
        parts = []
        waiting.start()
        ended = ThreadPoolExecutor(1).submit(each, lambda one: one.conclude({"end": 2}), made[:1])
        waiting.join(20)
        assert parts == [None]
        with pytest.raises(BatchMismatch, match="it ends after 2 batches on rank 0, it has a batc"):
            made[1].conclude(update())
        assert isinstance(ended.result()[0], BatchMismatch)


def test_a_failure_reaches_the_others_once_and_closing_ends_waits(store):
    with agreements(store) as made:
        made[1].fail(ValueError("sample 3 is empty"))
        made[1].fail(PeerError("later"))
        with pytest.raises(PeerError, match="rank 1 failed: ValueError: sample 3 is empty"):
            made[0].conclude(update())
    with agreements(store) as made:
        made[0].stop()
        with pytest.raises(Closed):
            made[0].conclude(update())


def test_a_rank_that_left_and_then_ended_counts_once(store, monkeypatch):
    """Otherwise the second of three ranks would delete a verdict that the third has yet to read."""
    ranks = [LoaderRanks(rank, 3, rank, 3) for rank in range(3)]
    with agreements(store, ranks) as made:
        made[2].leave()
        monkeypatch.setattr(Peers, "near", lambda _, state: [2] if state == "ended" else [])
        wait_until(lambda: has_verdict(store))
        made[1].leave()
        assert has_verdict(store)
        with pytest.raises(PeerError, match="rank 2 left this iteration after 0 batches"):
            made[0].conclude(update())
        monkeypatch.undo()
    assert not [key for key in store.list_keys() if "dyncp" in key]


def test_a_rank_that_closes_or_is_lost_for_a_moment_is_no_reason_to_go_on_without_it(store):
    with agreements(store) as made:
        made[0].stop()  # rank 1 has no record yet
        assert not made[0]._leaving
        assert not wait_until(lambda: has_verdict(store), 0.3)
        made[0].leave()
        with pytest.raises(PeerError, match="rank 0 left this iteration after 0 batches"):
            made[1].conclude({"start": {}})


def test_a_record_that_nobody_understands_ends_the_iteration_on_all_ranks(store):
    with agreements(store) as made:
        errors = each(lambda one: one.conclude({"start": 3 - made.index(one)}), made)
    assert [str(error) for error in errors] == [
        "comparing the ranks' records raised TypeError: 'int' object is not subscriptable"
    ] * 2


def test_texts_in_the_store_that_cannot_be_read_are_refused(store):
    shared = SharedStore(store, "dyncp", 0, 20)
    deep = b"[" * 100_000
    for text in (deep, b"\xff", b"{"):
        store.set("dyncp/key", text)
        with pytest.raises(StoreError, match="the store has a text that cannot be read"):
            shared.get("key")
    with pytest.raises(PlanDecodeError, match="plan part is malformed"):
        decode_body(struct.pack("<I", len(deep)) + deep, "00" * 16)
    shared.close()


def test_a_rank_that_is_stopped_is_named_if_another_one_waits(store, monkeypatch):
    for name, seconds in {"HEARTBEAT": 0.05, "SILENT": 0.2, "GONE": 0.5}.items():
        monkeypatch.setattr(patience, name, seconds)
    with agreements(store) as made:
        first, second = (one._peers for one in made)
        second._ended.set()  # its heartbeat ends
        first.progress.wait()
        monkeypatch.setattr("dyncp.dataloader.peers._state", lambda _: "stopped")
        with pytest.raises(PeerError, match=r"no rank can continue: rank 1 .* sent no heartbeat"):
            made[0].conclude(update())


def test_parts_of_another_rank_are_refused():
    plan = plan_batch(Batch.of([masks.causal(40)], [0]), Topology(1, 2))
    selection = SelectedBatch(3, (SampleEntry(0, 0, 40, whole=40),), Position(batches=4))
    config = LoaderConfig(lengths=[40])
    source = open_source([{"input_ids": [0] * 40}], config.samples)

    class Given(Alone):
        """Has rank 0's part for everyone."""

        def part(self, selection):
            return ABOUT, plan.encoded_parts[0]

    context = LoaderContext(config, RANKS[0], source, MaskMaker(masks.causal), None)
    BatchPreparer(context, Given(TrainingProgress(0)))._prepare(BatchData(context, selection))
    context = LoaderContext(config, RANKS[1], source, MaskMaker(masks.causal), None)
    batch = BatchData(context, SelectedBatch(4, selection.entries, selection.end))
    with pytest.raises(PeerError, match="has the part of rank 0 of 2, not the part of rank 1 of 2"):
        BatchPreparer(context, Given(TrainingProgress(0)))._prepare(batch)


# Comparing records

START = {"epoch": 1, "batches": 40, "rest": "r"}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"settings": {"seed": "0", "window": "4"}},
            {"settings": {"seed": "1", "window": "4"}},
            "ranks made different loaders: seed is 0 on rank 0, 1 on rank 1; every rank needs",
        ),
        (
            {"start": START},
            {"start": START | {"batches": 39}},
            "ranks start at different positions: after batch 40 of epoch 1 on rank 0, after batch "
            "39 of epoch 1 on rank 1; load the same state",
        ),
        (
            {"start": START},
            {"start": START | {"rest": "s"}},
            "ranks start at different positions: {'epoch': 1, 'batches': 40, 'rest': 'r'} on rank",
        ),
        (
            update(),
            update(OTHER),
            "ranks disagree on batch 2: 12 tokens of samples 4, 7 on rank 0, 12 tokens of samples "
            "5 on rank 1; every rank needs the same dataset",
        ),
        (
            {"end": 3},
            {"end": 4},
            "disagree on the epoch: it ends after 3 batches on rank 0, it ends after 4 batches on",
        ),
        (
            update(digests={"0": [4, "mask", ""]}),
            update(digests={"0": [4, "musk", "x"]}),
            "ranks disagree on sample 4 (number 0 of batch 2): the masks is mask on rank 0, musk",
        ),
        (
            update(digests={"0": [4, "", ""], "1": [7, "", "abc"]}),
            update(digests={"1": [7, "", "abd"]}),
            "ranks disagree on sample 7 (number 1 of batch 2): the content is abc on rank 0, abd",
        ),
        (
            update(plan="p"),
            update(plan="q"),
            "ranks hold different plans of batch 2: p on rank 0, q",
        ),
    ],
)
def test_every_difference_has_its_sentence(first, second, message):
    assert message in disagreement({0: first, 1: second}, RANKS[0])
    for same in (first, second):
        assert disagreement({0: same, 1: same}, RANKS[0]) == ""


def test_replicas_have_other_batches_but_must_deal_alike():
    records = {0: update(fingerprint="f"), 1: update(OTHER, fingerprint="f", plan="q")}
    assert disagreement(records, REPLICAS[0]) == ""
    records[1] = update(OTHER, fingerprint="g")
    text = disagreement(records, REPLICAS[0])
    assert text.startswith(
        "replicas dealt the batches of an optimiser step differently: it is f on rank 0, g"
    )


def test_digests_that_only_one_rank_has_are_not_compared():
    records = {0: update(digests={"0": [4, "m", "c"]}), 1: update(digests={"0": [4, "m", ""]})}
    assert disagreement(records, RANKS[0]) == ""
