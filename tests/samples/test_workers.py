"""Processes that read samples ahead."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from dyncp import masks
from dyncp.samples import SampleError
from loaders import make_loader

pytestmark = pytest.mark.usefixtures("plans_here")

LENGTHS = [5, 9, 3, 12, 1, 7] * 3


class OddError(Exception):
    """Cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Documents(Dataset):
    """Returns the process that read a sample, and numbers drawn from every generator."""

    def __init__(self, broken=(), error=None):
        self.broken, self.error = broken, error

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        if index in self.broken:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise self.error
        drawn = (random.random(), np.random.rand(), torch.rand(1).item())
        return {"input_ids": [index] * LENGTHS[index], "process": os.getpid(), "drawn": drawn}


def fields_of(data, samples):
    return data | {name: [sample[name] for sample in samples] for name in ("process", "drawn")}


def load(num_workers, dataset=None, **options):
    options = {"tokens_per_batch": 16, "collate": fields_of} | options
    with make_loader(
        dataset or Documents(), masks.causal, num_workers=num_workers, **options
    ) as loader:
        return [data for _ in range(2) for data, _ in loader]


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_workers_read_what_is_read_without_them(lengths):
    plain, two, three = (load(n, lengths=lengths, shuffle=True) for n in (0, 2, 3))
    for data in (two, three):
        assert [d["input_ids"].tolist() for d in data] == [d["input_ids"].tolist() for d in plain]
    assert {process for d in plain for process in d["process"]} == {os.getpid()}
    processes = {process for d in two for process in d["process"]}
    assert os.getpid() not in processes
    assert len(processes) == 2
    assert not multiprocessing.active_children()


def test_what_a_dataset_draws_depends_on_sample_and_epoch_alone():
    two, three = (load(n, shuffle=True) for n in (2, 3))
    assert [d["drawn"] for d in two] == [d["drawn"] for d in three]
    drawn = [values for d in two for values in d["drawn"]]
    assert len(set(drawn)) == 2 * len(LENGTHS)
    assert [d["drawn"] for d in load(2, shuffle=True, seed=1)] != [d["drawn"] for d in two]
    with_lengths = load(2, shuffle=True, lengths=LENGTHS)
    assert sorted(v for d in with_lengths for v in d["drawn"]) == sorted(drawn)


def test_masks_that_need_the_sample_get_it_from_the_workers():
    def mask_fn(sample):
        assert sample["process"] != os.getpid()
        return masks.causal(sample)

    with make_loader(Documents(), mask_fn, num_workers=2, lengths=LENGTHS) as loader:
        assert sum(data["input_ids"].shape[1] for data, _ in loader) == sum(LENGTHS)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_errors_in_workers_name_the_sample(lengths):
    with pytest.raises(SampleError, match="reading of sample 4 raised OSError: disk on fire") as e:
        load(2, Documents([4], OSError("disk on fire")), lengths=lengths)
    assert isinstance(e.value.__cause__, OSError)
    with pytest.raises(SampleError, match="sample 4 raised RuntimeError: OddError: 1 and 2"):
        load(2, Documents([4], OddError(1, 2)), lengths=lengths)


def test_bad_samples_may_be_left_out_but_not_dead_workers():
    data = load(2, Documents([4, 5], OSError("disk on fire")), bad_samples="drop")
    assert sum(d["input_ids"].shape[1] for d in data) == 2 * (sum(LENGTHS) - 8)
    with pytest.raises(RuntimeError, match=r"a reading worker \(num_workers=2\) died before"):
        load(2, Documents([4]), bad_samples="drop")
    assert not multiprocessing.active_children()


def test_a_loader_that_was_closed_or_broken_off_reads_again():
    with make_loader(Documents(), masks.causal, tokens_per_batch=16, num_workers=2) as loader:
        next(iter(loader))
        assert len(multiprocessing.active_children()) == 2
        loader.close()
        assert not multiprocessing.active_children()
        assert sum(data["input_ids"].shape[1] for data, _ in loader) == sum(LENGTHS)


def test_streams_are_read_in_one_place():
    with pytest.raises(ValueError, match="num_workers= needs a dataset with __len__ and __getitem"):
        make_loader(iter([{"input_ids": [1]}]), masks.causal, num_workers=2)
    with pytest.raises(ValueError, match="num_workers is -1; at least 0"):
        make_loader(Documents(), masks.causal, num_workers=-1)


KILLED = """
import multiprocessing, os, signal
from dyncp import DCPDataLoader, LoaderTuning, masks

class Documents:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return {"input_ids": [index]}

loader = DCPDataLoader(Documents(), masks.causal, tuning=LoaderTuning(num_workers=2))
next(iter(loader))
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_training_process_that_is_killed():
    result = subprocess.run(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    workers = [int(pid) for pid in result.stdout.split()]
    assert len(workers) == 2
    end = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
