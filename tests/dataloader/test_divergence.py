"""Ranks that diverge get an error with the rank, within seconds: gloo ranks, long timeouts."""

import logging
import os
import re
import signal
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import IterableDataset

from dyncp import PlannerConfig, masks
from dyncp.dataloader import BatchMismatch, PeerError, StoreError, patience
from loaders import make_loader
from processes import (
    end_together,
    is_gone,
    run_ranks,
    tell,
    wait_for,
    wait_until,
)

LENGTHS = [40, 24, 33, 51, 18, 45, 29, 60]
PLANNER = PlannerConfig("bisection", block_size=4)
OPTIONS = {"tokens_per_batch": 64, "planner": PLANNER, "window": 1, "num_planners": 0}


class Tokens:
    """Samples of random tokens."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"input_ids": self.draw(index, LENGTHS[index])}


class Stream(IterableDataset):
    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return iter([{"input_ids": self.draw(i, n)} for i, n in enumerate(LENGTHS)])


def same(index, length):
    return torch.full((length,), index)


def by_rank(index, length):
    return torch.full((length,), index + 100 * dist.get_rank())


def later_by_rank(index, length):
    """Differs between ranks in a sample that is not compared when the loader is made."""
    return by_rank(index, length) if index == 6 else same(index, length)


NARROW = masks.sliding_window(window=2)


def augmented(index, length):
    return torch.randint(0, 1000, (length,))


def causal_or_narrow(sample):
    differs = dist.get_rank() and len(sample["input_ids"]) == 33
    return (NARROW if differs else masks.causal)(sample)


def causal_or_narrow_lambda():
    rank = dist.get_rank()
    return lambda sample: NARROW(sample) if rank else masks.causal(sample)


def outcome(make, act=list):
    """The error of a loader, or the result of `act`; and how many seconds it took."""
    dist.barrier()
    start = time.monotonic()
    try:
        with make() as loader:
            result = act(loader)
    except (BatchMismatch, PeerError, ValueError) as error:
        result = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    dist.barrier()
    return result, seconds


def tokens(loader):
    return [data["input_ids"][0].tolist() for data, _ in loader]


def read_differently(rank):
    patience.shorten()

    def error(dataset, mask_fn=masks.causal, **options):
        return outcome(lambda: make_loader(dataset, mask_fn, **OPTIONS | options))[0]

    lengths = {"lengths": LENGTHS}
    results = {
        "handshake": error(Tokens(by_rank), **lengths),
        "shared": error(Tokens(later_by_rank), **lengths),
        "all read": error(Tokens(later_by_rank)),
        "stream": error(Stream(by_rank)),
        "masks": error(Tokens(same), causal_or_narrow, **lengths),
        "masks, all read": error(Tokens(same), causal_or_narrow),
        "lambdas": error(Tokens(same), causal_or_narrow_lambda(), **lengths),
        "accumulation": error(Tokens(same), accumulation_steps=1 + rank),
        "raised": error(Tokens(same), seed=-rank),
    }

    def run(**options):
        make = partial(make_loader, Tokens(augmented), masks.causal, **OPTIONS | options)
        return outcome(make, tokens)[0]

    runs = run(), run(**lengths)
    keys = distributed_c10d._get_default_store().list_keys()
    dist.barrier()
    return results, runs, [key for key in keys if "dyncp" in key]


@pytest.fixture(scope="module")
def readers():
    return run_ranks(read_differently, 2)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("handshake", "BatchMismatch: ranks made different loaders: sample 0 is "),
        ("shared", "BatchMismatch: ranks disagree on sample 6 (number "),
        ("all read", "BatchMismatch: ranks disagree on sample 6 (number "),
        (
            "stream",
            "BatchMismatch: ranks disagree on sample 0 (number 0 of batch 0): the content is ",
        ),
        ("masks", "BatchMismatch: ranks disagree on sample 2 (number "),
        ("masks, all read", "BatchMismatch: ranks disagree on sample 2 (number "),
        ("lambdas", "BatchMismatch: ranks made different loaders: masks of sample 0 is "),
        ("accumulation", "loaders: accumulation_steps is 1 on rank 0, 2 on rank 1; every rank"),
    ],
)
def test_ranks_that_read_or_make_different_things_are_told_the_sample(readers, case, message):
    first, second = (results[case] for results, _, _ in readers)
    assert message in first
    assert first == second


def test_a_rank_that_cannot_make_its_loader_is_named(readers):
    texts = [results["raised"] for results, _, _ in readers]
    assert texts[0].startswith(
        "PeerError: rank 1 could not make its loader: ValueError: seed is -1"
    )
    assert texts[1].startswith("ValueError: seed is -1")


def test_ranks_augment_alike_by_torchs_generator(readers):
    (_, first, keys), (_, second, _) = readers
    assert keys == []
    for one, other in zip(first, second, strict=True):
        assert sum(map(len, one)) + sum(map(len, other)) == sum(LENGTHS)
    assert first[0] == first[1]  # with and without lengths


def resume_differently(rank):
    """Errors of iterations that start at different positions; then one from the same position."""
    patience.shorten()
    texts = []
    with make_loader(Tokens(same), masks.causal, **OPTIONS) as loader:
        states = [loader.state_dict()]
        for _ in loader:
            states.append(loader.state_dict())
        ended = loader.state_dict()

        def begin(state, epoch=None):
            loader.load_state_dict(state)
            if epoch is not None:
                loader.set_epoch(epoch)
            try:
                list(loader)
            except BatchMismatch as error:
                texts.append(str(error))

        begin(states[2 - rank])  # one batch older
        begin(states[2] if rank else states[0])  # a forgotten load_state_dict
        begin(states[0], epoch=rank)
        begin(ended if rank else states[2])  # one had ended the epoch
        loader.load_state_dict(states[2])
        rest = [plan.fingerprint for _, plan in loader]
    return texts, rest, len(states)


def test_ranks_that_start_at_different_positions_are_told_so_on_all_ranks():
    (texts, rest, states), second = run_ranks(resume_differently, 2)
    assert (texts, rest, states) == second
    told = "ranks start at different positions: after batch {} of epoch {} on rank 0, after batch"
    positions = [(2, 0), (0, 0), (0, 0), (2, 0)]
    assert len(texts) == len(positions)
    for text, at in zip(texts, positions, strict=True):
        assert text.startswith(told.format(*at))
    assert all("load the same state on all ranks or on none" in text for text in texts)
    assert len(rest) == states - 1 - 2  # the loader may be used again


class Warnings(logging.Handler):
    """Keeps the texts of warnings, and tells all ranks of the first."""

    def __init__(self, told):
        super().__init__(logging.WARNING)
        self.told, self.texts = told, []
        logging.getLogger("dyncp").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())
        tell(self.told)


def take_unequally(rank):
    """Rank 1 leaves, raises or lags; returns this rank's errors or warnings, and the seconds."""
    patience.shorten()
    make = partial(make_loader, Tokens(same), masks.causal, look_ahead=0, **OPTIONS)

    def leave(loader):
        for number, _ in enumerate(loader):
            if rank and number == 1:
                break

    def raise_(loader):
        try:
            for number, _ in enumerate(loader):
                if rank and number == 1:
                    raise ArithmeticError("loss is NaN")
        except ArithmeticError:
            pass

    def lag(loader):
        batches = iter(loader)
        next(batches)
        warnings = Warnings("rank 0 waits")
        if rank:
            wait_for("rank 0 waits")
        next(batches)
        return list(warnings.texts)

    def run_ahead(loader):
        """Rank 0 takes one batch more than rank 1; then both train."""
        warnings = Warnings("rank 0 is ahead")
        batches = iter(loader)
        for _ in range(2 - rank):
            next(batches)
        wait_for("rank 0 is ahead")
        return list(warnings.texts)

    ahead = partial(make_loader, Tokens(same), masks.causal, **OPTIONS)
    return [*(outcome(make, act) for act in (leave, raise_, lag)), outcome(ahead, run_ahead)]


def test_a_rank_that_left_raised_or_lags_is_named_within_seconds():
    (left, raised, lagging, ahead), others = run_ranks(take_unequally, 2)
    for text, seconds in (left, raised):
        assert text.startswith(
            "PeerError: rank 1 left this iteration after 2 batches (break, an exc"
        )
        assert text.endswith("all ranks must take the same number of batches")
        assert seconds < 60
    warning = lagging[0][0]
    assert re.match(r"rank 0 has waited \d+ s for ", warning)
    assert "rank 1 has taken 1 batches and not requested the next one" in warning
    assert others[2][0] == []
    warning = ahead[0][0]
    assert warning.startswith(
        "ranks have taken different numbers of batches for 0.5 s, and none waits"
    )
    assert "(0: 2, 1: 1)" in warning


def die(rank):
    patience.shorten()
    if not rank:
        return outcome_of_death()
    batches = iter(make_loader(Tokens(same), masks.causal, look_ahead=0, **OPTIONS))
    next(batches)
    time.sleep(0.3)  # rank 0 waits for the next batch
    os._exit(1)


def outcome_of_death():
    with make_loader(Tokens(same), masks.causal, look_ahead=0, **OPTIONS) as loader:
        return error_of_epoch(loader)


def error_of_epoch(loader):
    """The error of an epoch, and the seconds until it was raised."""
    start = time.monotonic()
    try:
        list(loader)
    except (PeerError, StoreError) as error:
        return str(error), time.monotonic() - start
    return None


def die_between_epochs(rank):
    patience.shorten()
    with make_loader(Tokens(same), masks.causal, look_ahead=0, **OPTIONS) as loader:
        list(loader)
        if rank:
            os._exit(1)
        return error_of_epoch(loader)


def die_near_the_end(rank):
    """Rank 1 dies before it agrees on batch 2, when it has selected the last batch."""
    patience.shorten()
    seen = []

    def collate(data, samples):
        seen.append(data)
        if rank and len(seen) == 3:
            time.sleep(0.5)  # its heartbeat says how far it is
            os._exit(1)
        return data

    with make_loader(Tokens(same), masks.causal, collate=collate, **OPTIONS) as loader:
        return error_of_epoch(loader)


@pytest.mark.parametrize("dies", [die, die_between_epochs, die_near_the_end])
def test_a_rank_that_died_is_named_within_seconds(dies):
    text, seconds = run_ranks(dies, 2)[0]
    assert text.startswith("no rank can continue: rank 1 (process ")
    assert text.endswith(" has ended")
    assert seconds < 60


def end_as_host_of_the_store(rank, end):
    """Rank 0, which hosts the store, is killed or stopped after the first batch."""
    patience.shorten()
    pids = torch.zeros(2, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    with make_loader(
        Tokens(same), masks.causal, look_ahead=0, store_timeout=2, **OPTIONS
    ) as loader:
        if rank:
            told = error_of_epoch(loader)
            with suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGKILL)
            return told
        batches = iter(loader)
        next(batches)
        os.kill(os.getpid(), end)
    return None


@pytest.mark.parametrize(
    ("end", "state"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "is stopped")]
)
def test_the_host_of_the_store_is_named_if_it_is_gone(end, state):
    text, seconds = run_ranks(end_as_host_of_the_store, 2, end)[1]
    assert text.startswith("rank 1: the store ")
    assert re.search(rf"; rank 0 \(process \d+ on .*\) {state}$", text)
    assert seconds < 60


def stop_after_one_batch(rank):
    patience.shorten()
    patience.GONE = 1.0
    pids = torch.zeros(2, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    with make_loader(Tokens(same), masks.causal, look_ahead=0, **OPTIONS) as loader:
        if not rank:
            told = error_of_epoch(loader)
            os.kill(pids[1], signal.SIGKILL)
            return told
        batches = iter(loader)
        next(batches)
        os.kill(os.getpid(), signal.SIGSTOP)
    return None


def test_a_stopped_rank_is_named_once_it_is_silent_for_long():
    text, seconds = run_ranks(stop_after_one_batch, 2)[0]
    assert re.match(r"no rank can continue: rank 1 \(process \d+ on .* has sent no heartbeat", text)
    assert seconds < 60


def follow(rank):
    """Rank 2 dies and rank 1 leaves, as training would when a message fails; rank 0 comes last."""
    patience.shorten()
    pids = torch.zeros(3, dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    text = ""
    with make_loader(Tokens(same), masks.causal, look_ahead=0, **OPTIONS) as loader:
        batches = iter(loader)
        next(batches)
        if rank == 2:
            os._exit(1)
        wait_until(lambda: is_gone(pids[2]))
        try:
            if not rank:
                wait_for("rank 1 left")
                next(batches)
        except PeerError as error:
            text = str(error)
    if rank:
        tell("rank 1 left")
    keys = num_keys()
    end_together(0, 1)
    return text, keys


def num_keys():
    return sum("dyncp" in key for key in distributed_c10d._get_default_store().list_keys())


def test_a_rank_that_died_is_named_although_another_one_left_and_no_keys_stay():
    text, keys = run_ranks(follow, 3)[0]
    assert text.startswith("no rank can continue: rank 2 (process ")
    assert keys == 0


def leave_in_turn(rank):
    with make_loader(Tokens(same), masks.causal, look_ahead=0, **OPTIONS) as loader:
        batches = iter(loader)
        next(batches)
        text = ""
        if rank < 2:
            wait_for(f"rank {rank + 1} left")
        try:
            if not rank:
                next(batches)
        except PeerError as error:
            text = str(error)
    tell(f"rank {rank} left")
    end_together(0, 1, 2)
    return text


def test_of_ranks_that_left_the_first_is_named_first():
    text = run_ranks(leave_in_turn, 3)[0]
    assert text.startswith("rank 2 left this iteration after 1 batches (break, an exc")
