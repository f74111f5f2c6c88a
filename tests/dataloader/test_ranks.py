"""The loader on real gloo ranks: agreement, faults, resuming, replicas; no key is left behind."""

import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from dyncp import (
    AttentionShape,
    BatchMismatch,
    DCPExecutor,
    PeerError,
    PlannerConfig,
    SampleError,
    StoreError,
    masks,
)
from dyncp.dataloader.store import SharedStore
from loaders import make_loader
from processes import run_ranks, stop

LENGTHS = [5, 19, 3, 12, 1, 7, 20, 13, 2, 9, 11, 4]
SAMPLES = [{"input_ids": [i] * n, "sample": [i] * n} for i, n in enumerate(LENGTHS)]
OPTIONS = {
    "tokens_per_batch": 24,
    "shuffle": True,
    "seed": 5,
    "lengths": LENGTHS,
    "token_fields": {"sample": 0},
    "model": AttentionShape(4, 2, 8, "fp32"),
    "planner": PlannerConfig("bisection", block_size=4),
}

PROBES = {0, 5, 11}  # samples that stand for the dataset, read by all


class Reading:
    """Records which samples were read."""

    def __init__(self, broken=None):
        self.read, self.broken = set(), broken

    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, index):
        if index == self.broken:
            raise OSError("disk on fire")
        self.read.add(index)
        return SAMPLES[index]


def tokens_of(data):
    """The number of local tokens of each sample."""
    return dict(Counter(data["sample"][0].tolist()))


def num_keys():
    """Number of keys of loaders in the store, after a barrier."""
    dist.barrier()
    keys = distributed_c10d._get_default_store().list_keys()
    dist.barrier()
    return sum("dyncp" in key for key in keys)


def run_of(batches):
    """What must be equal after resuming, for each batch."""
    return [
        (tokens_of(data), int(data["num_items_in_batch"]), plan.fingerprint)
        for data, plan in batches
    ]


def whole_batches(runs):
    """The runs of all ranks as global batches: tokens of every sample, items, fingerprint."""
    joined = []
    for parts in zip(*runs, strict=True):
        tokens = sum((Counter(part[0]) for part in parts), Counter())
        (rest,) = {part[1:] for part in parts}
        joined.append((dict(tokens), *rest))
    return joined


def check_parts_and_resume(rank):
    dataset = Reading()
    before = num_keys()
    with make_loader(dataset, masks.causal, accumulation_steps=2, **OPTIONS) as loader:
        executor = DCPExecutor(timeout=60)
        executor.transport.agree = None  # a collective would call it
        states, plain, most = [loader.state_dict()], [], 0
        for item in loader:
            most = max(most, num_keys())
            executor.prepare(item[1])
            plain.append(item)
            states.append(loader.state_dict())
        read = set(dataset.read)
        held = set().union(*(tokens_of(data) for data, _ in plain))
        resumed = []
        for state in states:
            loader.load_state_dict(state)
            resumed.append(run_of(loader))
    return {
        "read": read,
        "held": held,
        "states": states,
        "plain": run_of(plain),
        "digests": [plan.digest for _, plan in plain],
        "resumed": resumed,
        "keys": num_keys() - before,
        "most_keys": most,
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("dyncp")],
    }


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(check_parts_and_resume, 4, planners=True)


def test_every_sample_is_trained_on_once_and_ranks_hold_parts_of_one_plan(four_ranks):
    batches = whole_batches([result["plain"] for result in four_ranks])
    seen = sum((Counter(tokens) for tokens, _, _ in batches), Counter())
    assert dict(seen) == dict(enumerate(LENGTHS))
    assert len({tuple(result["digests"]) for result in four_ranks}) == 1
    items = sum(LENGTHS) - len(LENGTHS)
    assert sum(batch[1] for batch in batches[::2]) == items  # of steps of two batches each


def test_a_rank_reads_only_the_samples_that_it_holds_tokens_of(four_ranks):
    for result in four_ranks:
        assert result["held"] <= result["read"]
        more = result["read"] - result["held"] - PROBES
        assert len(more) <= 1  # one, for the dtype of an empty part
    assert any(len(result["read"]) < len(SAMPLES) for result in four_ranks)


def test_resuming_on_as_many_ranks_gives_exactly_the_next_batches(four_ranks):
    for result in four_ranks:
        assert len(result["states"]) == len(result["plain"]) + 1
        for taken, rest in enumerate(result["resumed"]):
            assert rest == result["plain"][taken:]


def test_no_keys_and_no_threads_are_left(four_ranks):
    assert [(result["keys"], result["threads"]) for result in four_ranks] == [(0, [])] * 4
    assert 0 < max(result["most_keys"] for result in four_ranks) < 60  # a few batches' at a time


def resume_on_two(rank, states):
    options = OPTIONS | {"tokens_per_batch": None}  # taken over from the state
    results = []
    with make_loader(SAMPLES, masks.causal, accumulation_steps=2, **options) as loader:
        for state in states:
            loader.load_state_dict(state)
            results.append(run_of(loader))
    results.append(disagree(rank))
    return results


def disagree(rank):
    """Errors of loaders that differ between the two ranks, or fail on one."""
    before = num_keys()
    texts = []
    different = (
        (masks.causal, {"seed": rank}, None),
        (masks.causal, {"lengths": LENGTHS[: 12 - 6 * rank], "shuffle": False}, None),
        (masks.causal if rank else masks.full, {}, None),
        (masks.causal, {}, 6 if rank else None),
    )
    for mask_fn, options, broken in different:
        length = len(options.get("lengths", LENGTHS))
        dataset = Reading(broken) if length == len(SAMPLES) else SAMPLES[:length]
        try:
            with make_loader(dataset, mask_fn, **OPTIONS | options) as loader:
                list(loader)
        except (BatchMismatch, PeerError, SampleError) as error:
            texts.append((type(error).__name__, str(error)))
    return texts, num_keys() - before


@pytest.fixture(scope="module")
def two_ranks(four_ranks):
    return run_ranks(resume_on_two, 2, four_ranks[0]["states"])


def test_resuming_on_fewer_ranks_gives_the_same_global_batches(four_ranks, two_ranks):
    batches = whole_batches([result["plain"] for result in four_ranks])
    for taken in range(len(batches) + 1):
        assert whole_batches([result[taken] for result in two_ranks]) == batches[taken:]


def test_ranks_that_disagree_get_one_error_that_says_on_what(two_ranks):
    (first, keys_first), (second, keys_second) = (result[-1] for result in two_ranks)
    assert keys_first == keys_second == 0
    seeds, lengths, masks_differ, broken = zip(first, second, strict=True)
    assert seeds[0] == seeds[1]
    assert {name for name, _ in (*seeds, *lengths, *masks_differ)} == {"BatchMismatch"}
    assert "different loaders: seed is 0 on rank 0, 1 on rank 1; every rank" in seeds[0][1]
    assert "number of samples is 12 on rank 0, 6 on rank 1" in lengths[0][1]
    assert masks_differ[0] == masks_differ[1]
    assert "masks of sample 0 is " in masks_differ[0][1]
    assert sorted(name for name, _ in broken) == ["PeerError", "SampleError"]
    assert all("reading of sample 6 raised OSError: disk on fire" in text for _, text in broken)
    assert broken[0][1].startswith("rank 1 failed: ")


def train_on_replicas(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "cp"))
    before = num_keys()
    with make_loader(SAMPLES[:7], masks.causal, group=mesh, **OPTIONS | {
        "lengths": LENGTHS[:7], "shuffle": False,
    }) as loader:  # fmt: skip
        run = [
            (tokens_of(data), int((data["shift_labels"] != -100).sum()),
             int(data["num_items_in_batch"]), plan.num_ranks, plan.filler, len(plan.lengths))
            for data, plan in loader
        ]  # fmt: skip
        assert len(loader) == len(run)
    return run, share_with_peers(), num_keys() - before


def share_with_peers():
    """Plan rank, plan digest, tokens and targets of a rank with a tensor-parallel peer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    with make_loader(SAMPLES, masks.causal, group=mesh, **OPTIONS) as loader:
        return [
            (plan.rank, plan.digest, tokens_of(data), int(data["num_items_in_batch"]))
            for data, plan in loader
        ]


def test_replicas_train_on_different_batches_and_tensor_parallel_peers_on_the_same():
    runs = run_ranks(train_on_replicas, 4)
    assert [keys for _, _, keys in runs] == [0] * 4
    results = [(run, shared) for run, shared, _ in runs]
    check_peers([shared for _, shared in results])
    targets = documents = 0
    for step in zip(*(run for run, _ in results), strict=True):
        assert {ranks for _, _, _, ranks, _, _ in step} == {2}
        (items,) = {items for _, _, items, _, _, _ in step}
        assert items == sum(own for _, own, *_ in step)
        targets += items
        documents += sum(lengths for *_, filler, lengths in step[::2] if not filler)
    assert targets == sum(LENGTHS[:7]) - 7  # fillers of a last round that is not full count none
    assert documents == 7
    assert any(filler for run, _ in results for *_, filler, _ in run)
    first = [set(run[0][0]) for run, _ in results]
    assert not (first[0] | first[1]) & (first[2] | first[3])


LONG = [3 + 17 * i % 40 for i in range(120)]


def resume_replicas(rank, state, steps):
    """Number of tokens of each sample in `steps` steps after a state, and the final state."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "cp"))
    samples = [{"input_ids": [i] * n} for i, n in enumerate(LONG)]
    options = {"tokens_per_batch": 64, "shuffle": True, "lengths": LONG, "sample_ids": True}
    with make_loader(samples, masks.causal, group=mesh, window=4, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        seen = Counter()
        for _, (data, _) in zip(range(steps), loader, strict=False):
            seen.update(data["sample_ids"].flatten().tolist())
            state = loader.state_dict()
    dist.barrier()  # rank 0 has the store
    return seen, state


def test_dealt_batches_resume_on_other_replicas_with_every_sample_once():
    first = run_ranks(resume_replicas, 4, None, 5)
    state = first[0][1]
    assert [found for _, found in first] == [state] * 4
    assert state["position"]["dealt"]
    same = run_ranks(resume_replicas, 4, state, 1000)
    fewer = run_ranks(resume_replicas, 2, state, 1000)
    for rest in (same, fewer):
        seen = sum((counts for counts, _ in [*first, *rest]), Counter())
        assert {i: n for i, n in seen.items() if i >= 0} == dict(enumerate(LONG))


def check_peers(shared):
    """Tensor-parallel peers get the same data; targets are counted once."""
    assert shared[0] == shared[1]
    assert shared[2] == shared[3]
    assert [ranks[0] for ranks in shared[0]] == [0] * len(shared[0])
    assert [ranks[0] for ranks in shared[2]] == [1] * len(shared[2])
    assert sum(items for _, _, _, items in shared[0]) == sum(LENGTHS) - len(LENGTHS)


SERVER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_store_that_does_not_answer_is_named_with_rank_and_key():
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    try:
        port = int(server.stdout.readline())
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        store = SharedStore(client, "dyncp/run", rank=3, timeout=1.5)
        other = SharedStore(client, "dyncp/run", rank=3, timeout=30)
        unconnected = SharedStore(client, "dyncp/run", rank=3, timeout=1.5)
        assert store.add("b1/left", 2) == other.add("b1/left", 0) == 2
        stop(server.pid)
        with pytest.raises(StoreError, match="rank 3: the store did not answer add of key '"):
            store.add("b1/left", 1)
        with pytest.raises(StoreError, match=r"'dyncp/run/b1/left' within 1.5 s"):
            store.has("b2/decision")  # at once: it is known to be gone
        with pytest.raises(StoreError, match="did not answer check of key 'dyncp/run/error'"):
            unconnected.has("error")
        server.kill()
        with pytest.raises(StoreError, match="rank 3: the store failed at check of key"):
            other.has("b1/left")
    finally:
        server.kill()
        server.wait()
    for closed in (store, other, unconnected):
        closed.close()
