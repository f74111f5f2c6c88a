"""Trains through the loader for many batches while planning goes wrong, and compares the losses.

    python -m benchmarks.soak                       1,000 batches on 4 gloo processes, three runs
    python -m benchmarks.soak --ranks 2 --batches 20 --samples 120 --every 10 --json

1. undisturbed
2. every 50 batches a planning process is killed, and another one is stopped for half a second (a
   slow plan): losses must equal run 1 bit for bit
3. the same, and the planner raises for one batch in 20, which then get static plans: losses within
   1e-6 of run 1, and bit for bit up to the first static plan

In every run each sample is trained on once per epoch. Memory and keys in the store are printed.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d

from benchmarks.cases import failing_planner
from benchmarks.decoder import Decoder
from dyncp import (
    AttentionShape,
    DCPAttn,
    DCPDataLoader,
    DCPExecutor,
    LoaderTuning,
    masks,
    next_token_loss,
    plan_batch,
    sum_gradients,
    sum_over_ranks,
)

RUNS = ("undisturbed", "kills and slow plans", "kills, slow plans, errors")
SEED, STOPPED_SECONDS = 3, 0.5
SHAPE = AttentionShape(q_heads=2, kv_heads=1, head_dim=8, dtype="fp64")
TOLERANCE = 1e-6


class Options(NamedTuple):
    """Ranks, length of the run, and how often a planning process is killed (in batches)."""

    ranks: int
    batches: int
    samples: int
    every: int


def make_samples(number: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Samples with long-tailed lengths from 2 to 120; every token identifies its sample."""
    rng = np.random.default_rng(SEED)
    lengths = np.clip(rng.lognormal(3, 0.8, number), 2, 120).astype(int).tolist()
    samples = [
        {"input_ids": rng.integers(0, 64, n), "sample": np.full(n, i)}
        for i, n in enumerate(lengths)
    ]
    return samples, lengths


def disturb(loader: DCPDataLoader, number: int, rank: int, options: Options) -> None:
    """Kills this rank's planning process, or stops it for a while, if it is this rank's turn."""
    turn, offset = divmod(number, options.every)
    pid = next(iter(loader.planning_pids), None)
    if pid is None:
        return
    if offset == options.every // 2 and rank == turn % options.ranks:
        os.kill(pid, signal.SIGKILL)
    elif offset == options.every // 4 and rank == (turn + 1) % options.ranks:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(STOPPED_SECONDS, _continue, (pid,)).start()


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def loader_keys() -> int:
    keys = distributed_c10d._get_default_store().list_keys()
    return sum("dyncp" in key for key in keys)


class Run:
    """One rank of one run."""

    def __init__(self, name: str, rank: int, options: Options) -> None:
        self.rank, self.options = rank, options
        self.disturbed = name != RUNS[0]
        samples, self.lengths = make_samples(options.samples)
        tuning = LoaderTuning(plan_function=failing_planner if name == RUNS[2] else plan_batch)
        self.loader = DCPDataLoader(
            samples,
            masks.causal,
            model=SHAPE,
            tokens_per_batch=160,
            lengths=self.lengths,
            shuffle=True,
            seed=SEED,
            token_fields={"sample": 0},
            tuning=tuning,
        )
        torch.manual_seed(SEED)
        self.model = Decoder(SHAPE, layers=1, hidden=16, ffn=32, vocab=64).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.executor = DCPExecutor(timeout=120)
        self.losses: list[float] = []
        self.static: list[int] = []
        self.table: list[tuple[int, float, int]] = []
        self.exactly_once = True

    def run(self) -> dict[str, Any]:
        epoch = 0
        with self.loader:
            while len(self.losses) < self.options.batches:
                self.loader.set_epoch(epoch)
                self.train_epoch()
                epoch += 1
            metrics = self.loader.metrics.snapshot()
        dist.barrier()
        return {
            "losses": self.losses,
            "static": self.static,
            "table": self.table,
            "exactly_once": self.exactly_once,
            "epochs": epoch,
            "restarts": metrics["restarts"],
            "keys_after": loader_keys(),
            "threads_after": sum(t.name.startswith("dyncp") for t in threading.enumerate()),
        }

    def train_epoch(self) -> None:
        """Trains to the end of the epoch, even if there are more batches than requested."""
        seen: Counter[int] = Counter()
        for data, plan in self.loader:
            seen.update(data["sample"].flatten().tolist())
            self.train_batch(data, plan)
        counts = torch.tensor([seen[i] for i in range(self.options.samples)])
        self.exactly_once &= sum_over_ranks(counts).tolist() == self.lengths

    def train_batch(self, data: dict[str, torch.Tensor], plan: Any) -> None:
        number = len(self.losses)
        if self.disturbed:
            disturb(self.loader, number, self.rank, self.options)
        last = self.loader.metrics.last
        if last is not None and last.static:
            self.static.append(number)
        logits = self.model(data, partial(DCPAttn.apply, self.executor.prepare(plan)))
        loss = next_token_loss(logits, data)
        self.optimizer.zero_grad()
        loss.backward()
        sum_gradients(self.model)
        self.optimizer.step()
        self.losses.append(sum_over_ranks(loss.detach().clone()).item())
        if number % max(1, self.options.batches // 10) == 0:
            self.table.append((number, resident_megabytes(), loader_keys()))
            if not self.rank:
                print(f"  batch {number}", file=sys.stderr, flush=True)


def run_rank(rank: int, port: int, options: Options, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=120),
    )
    for name in RUNS:
        if not rank:
            print(name, file=sys.stderr, flush=True)
        results.put((rank, name, Run(name, rank, options).run()))
        dist.barrier()
    dist.destroy_process_group()


def soak(options: Options) -> dict[str, list[dict[str, Any]]]:
    """The results of every rank, by run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    ranks = mp.spawn(run_rank, (port, options, results), options.ranks, join=False)
    found: dict[str, list[Any]] = {name: [None] * options.ranks for name in RUNS}
    for _ in range(options.ranks * len(RUNS)):
        while results.empty():
            if ranks.join(timeout=0.2) and results.empty():
                raise RuntimeError("a rank ended without its results")
        rank, name, result = results.get()
        found[name][rank] = result
    while not ranks.join():
        pass
    return found


def summarise(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    plain = found[RUNS[0]][0]["losses"]
    summary: dict[str, Any] = {}
    for name, ranks in found.items():
        losses, static = ranks[0]["losses"], ranks[0]["static"]
        before = static[0] if static else len(losses)
        summary[name] = {
            "batches": len(losses),
            "epochs": ranks[0]["epochs"],
            "every_sample_once": all(rank["exactly_once"] for rank in ranks),
            "processes_replaced": sum(rank["restarts"] for rank in ranks),
            "static_plans": len(static),
            "static_alike": all(rank["static"] == static for rank in ranks),
            "largest_difference": max(abs(a - b) for a, b in zip(losses, plain, strict=True)),
            "equal_bits_before_static": losses[:before] == plain[:before],
            "batches_of_equal_bits": sum(a == b for a, b in zip(losses, plain, strict=True)),
            "table": ranks[0]["table"],
            "keys_after": max(rank["keys_after"] for rank in ranks),
            "threads_after": max(rank["threads_after"] for rank in ranks),
        }
    return summary


def verdict(summary: dict[str, Any]) -> list[str]:
    """Sentences that say what is wrong; empty if all is well."""
    wrong = []
    for name, run in summary.items():
        for what, fine in (
            ("a sample was not seen exactly once", run["every_sample_once"]),
            ("ranks had static plans for different batches", run["static_alike"]),
            ("losses differ before any static plan", run["equal_bits_before_static"]),
            ("losses differ by more than 1e-6", run["largest_difference"] <= TOLERANCE),
            ("keys are left in the store", run["keys_after"] == 0),
            ("threads are left", run["threads_after"] == 0),
            ("a process was replaced", name != RUNS[0] or not run["processes_replaced"]),
            ("no process was replaced", name == RUNS[0] or run["processes_replaced"]),
            ("a plan was static", name == RUNS[2] or not run["static_plans"]),
            ("no plan was static", name != RUNS[2] or run["static_plans"]),
        ):
            if not fine:
                wrong.append(f"{name}: {what}")
    return wrong


def show(summary: dict[str, Any]) -> None:
    for name, run in summary.items():
        print(f"\n{name}: {run['batches']} batches, {run['epochs']} epochs")
        print(f"  planning processes replaced {run['processes_replaced']}")
        print(f"  static plans                {run['static_plans']}")
        print(f"  largest loss difference     {run['largest_difference']:.1e}")
        print(f"  losses of equal bits        {run['batches_of_equal_bits']}")
        print(f"  keys, threads afterwards    {run['keys_after']}, {run['threads_after']}")
        print(f"  {'batch':>8}{'MB, rank 0':>12}{'keys':>6}")
        for batch, megabytes, keys in run["table"]:
            print(f"  {batch:>8}{megabytes:>12.1f}{keys:>6}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=1000, help="at least; epochs are finished")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--samples", type=int, default=400, help="of an epoch (default 400)")
    parser.add_argument("--every", type=int, default=50, help="batches between kills (default 50)")
    parser.add_argument("--ranks", type=int, default=4, help="gloo processes (default 4)")
    args = parser.parse_args()
    options = Options(args.ranks, args.batches, args.samples, args.every)
    summary = summarise(soak(options))
    wrong = verdict(summary)
    if args.json:
        print(json.dumps({"runs": summary, "wrong": wrong}))
    else:
        show(summary)
        print("\n" + ("\n".join(wrong) if wrong else "All is well."))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
