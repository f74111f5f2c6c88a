"""One rank of one segment of `benchmarks.soak_resume`: resumes from the last checkpoint, trains
while something goes wrong, and reports what is still open afterwards."""

import faulthandler
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset, IterableDataset

from benchmarks.cases import failing_planner
from benchmarks.decoder import Decoder
from dyncp import (
    AttentionShape,
    BatchMismatch,
    DCPAttn,
    DCPDataLoader,
    DCPExecutor,
    LoaderTuning,
    PeerError,
    SampleError,
    masks,
    next_token_loss,
    sum_gradients,
    sum_over_ranks,
)
from dyncp.dataloader import patience

SEED, BUDGET = 3, 160
SHAPE = AttentionShape(q_heads=2, kv_heads=1, head_dim=8, dtype="fp64")
SEGMENT_SECONDS, COLLECTIVE_SECONDS = 240, 60
STOPPED_SECONDS, SLOW_SECONDS = 0.5, 0.2
PLANNER_FAULTS = ("kill planner", "stop planner")
READING_FAULTS = ("slow reads", "other tokens", "bad sample")
FATAL = ("other tokens", "bad sample", "raises", "killed")


class Scenario(NamedTuple):
    """What is trained on, and the layouts (replicas, ranks of each) that it runs on."""

    name: str
    dataset: str  # "lengths": known beforehand; "read": found by reading; "stream"
    layouts: tuple[tuple[int, int], ...]
    accumulation: int = 1
    planner_raises: bool = False
    workers: int = 0

    @property
    def exact(self) -> bool:
        """Whether losses must be equal bit for bit, because sums over ranks never change."""
        return len(self.layouts) == 1 and self.accumulation == 1 and not self.planner_raises


class Event(NamedTuple):
    """What happens on a rank after it has taken batch number `at` of the segment."""

    kind: str
    rank: int
    at: int


class Segment(NamedTuple):
    """Batches that are trained on, starting from the checkpoint in `folder`, if there is one."""

    scenario: Scenario
    samples: int
    folder: Path
    replicas: int
    ranks: int  # of a replica
    rounds: int
    saves: tuple[int, ...]  # after so many rounds
    events: tuple[Event, ...] = ()
    save_ends: bool = False  # also after the loops over epochs
    hurry: bool = False  # ranks notice sooner that others are late or dead

    @property
    def processes(self) -> int:
        return self.replicas * self.ranks

    @property
    def fatal(self) -> Event | None:
        return next((event for event in self.events if event.kind in FATAL), None)


class Reading:
    """Reads samples. A file in `folder` named like one of `READING_FAULTS` makes it fail, also in
    processes that read ahead."""

    def __init__(self, samples: int, folder: Path | None = None) -> None:
        rng = np.random.default_rng(SEED)
        self.lengths = np.clip(rng.lognormal(3, 0.8, samples), 2, 120).astype(int).tolist()
        self.folder = folder

    def sample(self, index: int) -> dict[str, Any]:
        """A sample; every token identifies it."""
        faults = os.listdir(self.folder) if self.folder else ()
        if "bad sample" in faults:
            raise OSError("disk on fire")
        if "slow reads" in faults and index % 7 == 0:
            time.sleep(SLOW_SECONDS)
        length = self.lengths[index]
        tokens = np.random.default_rng((SEED, index)).integers(0, 64, length)
        return {
            "input_ids": (tokens + ("other tokens" in faults)) % 64,
            "sample": np.full(length, index),
        }


class Samples(Dataset[dict[str, Any]]):
    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def __len__(self) -> int:
        return len(self.reading.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.reading.sample(index)


class Stream(IterableDataset[dict[str, Any]]):
    """A stream with a different order in every epoch, and a state."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.epoch, self.at = reading, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = np.random.default_rng((SEED, self.epoch)).permutation(len(self.reading.lengths))
        for index in order[self.at :].tolist():
            self.at += 1
            yield self.reading.sample(index)


def make_loader(segment: Segment, reading: Reading, mesh: Any) -> DCPDataLoader:
    scenario = segment.scenario
    options: dict[str, Any] = {"shuffle": True}
    tuning = {"num_workers": scenario.workers}
    dataset: Any = Samples(reading)
    if scenario.dataset == "lengths":
        options["lengths"] = reading.lengths
    if scenario.dataset == "stream":
        dataset, options, tuning = Stream(reading), {}, {}
    if scenario.planner_raises and segment.events:
        tuning["plan_function"] = failing_planner
    return DCPDataLoader(
        dataset,
        masks.causal,
        group=mesh,
        model=SHAPE,
        tokens_per_batch=BUDGET,
        accumulation_steps=scenario.accumulation,
        seed=SEED,
        sample_ids=True,
        token_fields={"sample": 0},
        tuning=LoaderTuning(**tuning),
        **options,
    )


class Training:
    """Model, optimiser and loader of one rank, resumed from the last checkpoint."""

    def __init__(self, segment: Segment, rank: int, mesh: Any) -> None:
        self.segment, self.rank = segment, rank
        self.faults = segment.folder / f"faults-{rank}"
        self.faults.mkdir()
        self.reading = Reading(segment.samples, self.faults)
        self.model = _model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.executor = DCPExecutor(mesh["cp"], timeout=COLLECTIVE_SECONDS)
        self.loader = make_loader(segment, self.reading, mesh)
        self.batches: Iterator[Any] = iter(())
        self.rounds, self.pending = 0, 0  # rounds of this segment; those of a step that has begun
        self.log: list[dict[str, Any]] = []  # of every round since the start of the run
        self.timers: list[threading.Timer] = []
        self.static = 0
        self.all_prepared = False  # before another rank failed: the loader waits for nobody

    def run(self) -> None:
        self.resume()
        while self.rounds < self.segment.rounds:
            self.batches = iter(self.loader)
            for data, plan in self.batches:
                self.disturb()
                self.train(data, plan)
                if self.rounds in self.segment.saves:
                    self.save()
                if self.rounds == self.segment.rounds:
                    return
            if self.pending:
                self.step()
            if self.segment.save_ends:
                self.save()

    def train(self, data: dict[str, Any], plan: Any) -> None:
        last = self.loader.metrics.last
        self.static += last is not None and last.static
        logits = self.model(data, partial(DCPAttn.apply, self.executor.prepare(plan)))
        loss = next_token_loss(logits, data)
        loss.backward()
        own = torch.cat([loss.detach()[None], self.tokens_of(data)])
        total, *tokens = sum_over_ranks(own).tolist()
        found = {str(i): int(n) for i, n in enumerate(tokens) if n}
        layout = {"replicas": self.segment.replicas, "ranks": self.segment.ranks}
        self.log.append({"epoch": self.loader.epoch, "loss": total, "tokens": found} | layout)
        self.rounds, self.pending = self.rounds + 1, self.pending + 1
        if self.pending == self.segment.scenario.accumulation:
            self.step()

    def tokens_of(self, data: dict[str, Any]) -> torch.Tensor:
        """The number of tokens of every sample, without fillers and padding."""
        own, places = data["sample"].flatten(), data["sample_ids"].flatten()
        if self.segment.scenario.dataset != "stream":
            assert torch.equal(own[places >= 0], places[places >= 0]), "another sample's tokens"
        return torch.bincount(own[places >= 0], minlength=self.segment.samples).double()

    def step(self) -> None:
        sum_gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.pending = 0

    def disturb(self) -> None:
        for event in self.segment.events:
            if (event.rank, event.at) == (self.rank, self.rounds):
                self.happen(event.kind)

    def happen(self, kind: str) -> None:
        pid = next(iter(self.loader.planning_pids), None)
        if kind == "kill planner" and pid is not None:
            os.kill(pid, signal.SIGKILL)
        elif kind == "stop planner" and pid is not None:
            os.kill(pid, signal.SIGSTOP)
            self.timers.append(threading.Timer(STOPPED_SECONDS, _continue, (pid,)))
            self.timers[-1].start()
        if kind in READING_FAULTS:
            (self.faults / kind).touch()
        if kind in ("raises", "killed"):
            (self.segment.folder / "fault").write_text(str(time.time()))
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raises":
            raise ArithmeticError("loss is NaN")

    def save(self) -> None:
        """Rank 0 writes a checkpoint that any number of ranks can resume; states are equal on all
        ranks."""
        state = self.loader.state_dict()
        text = json.dumps(state, sort_keys=True, default=repr)
        mark = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
        total = sum_over_ranks(torch.tensor(mark)).item()
        assert total == mark * dist.get_world_size(), f"ranks have other states than {text}"
        gradients = [
            sum_over_ranks(p.grad.clone()) if p.grad is not None else None
            for p in self.model.parameters()
        ]
        if not self.rank:
            checkpoint = {
                "loader": state,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "gradients": gradients if self.pending else None,
                "pending": self.pending,
                "replicas": self.segment.replicas,
                "log": self.log,
            }
            path = self.segment.folder / "checkpoint.pt"
            torch.save(checkpoint, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)

    def resume(self) -> None:
        path = self.segment.folder / "checkpoint.pt"
        if not path.exists():
            return
        saved = torch.load(path, weights_only=False)
        self.loader.load_state_dict(saved["loader"])
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.log, self.pending = saved["log"], saved["pending"]
        if saved["gradients"]:
            for parameter, total in zip(self.model.parameters(), saved["gradients"], strict=True):
                parameter.grad = torch.zeros_like(total) if self.rank else total

    def close(self) -> None:
        self.loader.close()
        self.executor.close()
        for timer in self.timers:
            timer.join()

    def reason(self, error: Exception) -> Exception:
        """The loader's explanation of an error in a message or a sum over ranks that another rank
        did not join. Empty if the whole epoch had been prepared."""
        if isinstance(error, PeerError | BatchMismatch | SampleError | ArithmeticError):
            return error
        try:
            for _ in self.batches:
                pass
        except Exception as reason:
            return reason
        self.all_prepared = True
        return error


def run_rank(rank: int, segment: Segment, port: int) -> None:
    """Runs one rank and writes the result to `result-RANK.json`."""
    torch.set_num_threads(1)
    if segment.hurry:
        patience.shorten()
    faulthandler.dump_traceback_later(SEGMENT_SECONDS - 20)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    bound = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=segment.processes, timeout=bound
    )
    layout = (segment.replicas, segment.ranks)
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("dp", "cp"))
    sum_over_ranks(torch.zeros(1))
    multiprocessing.set_start_method("fork", force=True)  # for processes that read ahead
    resource_tracker.ensure_running()  # Python's own, which stays
    DCPExecutor(mesh["cp"], timeout=COLLECTIVE_SECONDS).close()  # as do groups, for the next one
    before = still_open()
    result = train(segment, rank, mesh)
    result["left"] = left_since(before)
    path = segment.folder / f"result-{rank}.json"
    path.with_suffix(".new").write_text(json.dumps(result))
    path.with_suffix(".new").rename(path)
    faulthandler.cancel_dump_traceback_later()
    if result["error"] is None:
        dist.barrier()
    dist.destroy_process_group()


def train(segment: Segment, rank: int, mesh: Any) -> dict[str, Any]:
    training = Training(segment, rank, mesh)
    first = error = None
    try:
        training.run()
    except Exception as raised:
        first, error = f"{type(raised).__name__}: {raised}", training.reason(raised)
    at = time.time()
    training.close()
    return {
        "first": first,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "all_prepared": training.all_prepared,
        "at": at,
        "rounds": training.rounds,
        "static": training.static,
        "restarts": training.loader.metrics.snapshot()["restarts"],
    }


def still_open() -> dict[str, list[str]]:
    """Threads, child processes and open files of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder that is being listed
            files.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    threads = [thread.name for thread in threading.enumerate()]
    return {"thread": threads, "child process": children, "file": files}


def left_since(before: dict[str, list[str]], seconds: float = 5.0) -> list[str]:
    """What is open now and was not before; it gets a few seconds to close."""

    def left() -> list[str]:
        now = still_open()
        return [
            f"{kind} {n}" for kind, names in now.items() for n in names if n not in before[kind]
        ]

    return wait_until_empty(left, seconds)


def wait_until_empty(left: Callable[[], list[str]], seconds: float) -> list[str]:
    end = time.monotonic() + seconds
    while (found := left()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _model() -> Decoder:
    torch.manual_seed(SEED)
    return Decoder(SHAPE, layers=1, hidden=16, ffn=32, vocab=64).double()


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
