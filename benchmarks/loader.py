"""Time per training step with the loader: planned ahead, without look-ahead, and precomputed.

    python -m benchmarks.loader
    python -m benchmarks.loader --load 2
    python -m benchmarks.loader --steps 40 --sample single --solver auto --busy

This process is rank 0 of 32 (4 nodes × 8). It plans every batch of 131,072 tokens alone; 32 ranks
would plan round robin. A step prepares its plan and waits 0.3 s, as for a GPU (--busy: computes
with one thread). The precomputed run takes the same prepared batches from a list, under the same
load (--load: processes that keep a core busy). Last, a single process takes batches of 8,192 tokens
that are ready.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter, sleep
from typing import Any
from unittest import mock

import numpy as np
import torch

from dyncp import AttentionShape, DCPDataLoader, DCPExecutor, LoaderTuning, PlannerConfig, masks
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.samplers import sample_lengths
from dyncp.topology import preset
from dyncp.transport import Null

TOKENS = 131_072


class Documents:
    """Documents whose lengths are drawn from a distribution, batch by batch."""

    def __init__(self, sample: str, batches: int) -> None:
        self.batches, self.lengths = [], []
        for seed in range(batches):
            drawn = sample_lengths(sample, TOKENS, seed)
            first = len(self.lengths)
            self.lengths += drawn
            self.batches.append(list(range(first, len(self.lengths))))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((self.lengths[index],), index % 50_000)}


@dataclass(frozen=True)
class Times:
    """Seconds of every step (from requesting its batch to requesting the next one), of waiting for
    its batch, and of preparing its plan."""

    steps: list[float]
    waits: list[float]
    prepares: list[float]

    @property
    def mean(self) -> float:
        """The mean of all steps but the first, which starts processes."""
        return mean(self.steps[1:])


def train(batches: Iterable[Any], executor: DCPExecutor | None, args: argparse.Namespace) -> Times:
    times, seconds, busy = Times([], [], []), args.seconds, args.busy
    start = perf_counter()
    for _, plan in batches:
        times.waits.append(perf_counter() - start)
        if executor is not None:
            executor.prepare(plan)
        times.prepares.append(perf_counter() - start - times.waits[-1])
        compute(seconds) if busy else sleep(seconds)
        now = perf_counter()
        times.steps.append(now - start)
        start = now
    return times


def compute(seconds: float) -> None:
    matrix = torch.ones(256, 256)
    end = perf_counter() + seconds
    while perf_counter() < end:
        matrix @ matrix


def open_loader(
    documents: Documents,
    args: argparse.Namespace,
    depth: int,
    executor: DCPExecutor | None = None,
) -> DCPDataLoader:
    one_of_many = LoaderRanks(rank=0, num_ranks=32)  # the group itself does not exist
    with mock.patch.object(LoaderRanks, "of", return_value=one_of_many):
        return DCPDataLoader(
            documents,
            masks.by_name(args.mask),
            model=AttentionShape(8, 2, 128),
            topology=preset("p4de", 4),
            planner=PlannerConfig(args.solver),
            batch_sampler=documents.batches,
            lengths=documents.lengths,
            tuning=LoaderTuning(look_ahead=depth, num_planners=args.planners),
            executor=executor,
        )


# Keeps a core busy for as long as its parent lives.
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextmanager
def load_beside(processes: int) -> Iterator[None]:
    """Runs processes that keep one core busy each while other work is measured."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def report(name: str, times: Times, least: float, note: str = "") -> None:
    later, waits = times.steps[1:], times.waits[1:]
    print(
        f"{name:<21}{times.steps[0]:8.3f}{median(later):8.4f}{times.mean:8.4f}{max(later):8.3f}"
        f"{times.mean / least:8.4f}{mean(waits):8.4f}{np.percentile(waits, 99):8.4f}"
        f"{mean(times.prepares[1:]):8.4f}  {note}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="seconds of a step (default 0.3)"
    )
    parser.add_argument("--sample", default="ldc", help="distribution of lengths (default ldc)")
    parser.add_argument("--mask", default="causal")
    parser.add_argument("--solver", default=PlannerConfig().solver)
    parser.add_argument("--look-ahead", type=int, default=LoaderTuning().look_ahead)
    parser.add_argument("--planners", type=int, help="planning processes (default: the loader's)")
    parser.add_argument("--load", type=int, default=0, help="concurrent busy processes (default 0)")
    parser.add_argument("--busy", action="store_true", help="compute instead of waiting")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with load_beside(args.load):
        measure(args)
        measure_alone(args.steps)


def measure(args: argparse.Namespace) -> None:
    documents = Documents(args.sample, args.steps)
    print(f"{args.steps} batches of {TOKENS:,} tokens ({args.sample}, {args.mask}), 32 ranks,")
    print(f"solver {args.solver}, steps of {args.seconds:g} s, {args.load} busy processes\n")
    columns = ("first", "median", "mean", "largest", "ratio", "wait", "p99", "prepare")
    print(f"{'seconds per step':<21}" + "".join(f"{column:>8}" for column in columns))
    executor = DCPExecutor(transport=Null(0, 32))
    with open_loader(documents, args, args.look_ahead) as loader:
        precomputed = list(loader)
    times = train(precomputed, None, args)
    least = times.mean
    report("precomputed", times, least)
    with open_loader(documents, args, args.look_ahead, executor) as loader:
        times = train(loader, executor, args)
        planners = len(loader.planning_pids)
        report(f"look-ahead {args.look_ahead}", times, least, loader.metrics.line())
        part_bytes = loader.metrics.snapshot()["part_bytes"]
    with open_loader(documents, args, args.look_ahead) as loader:
        report("prepared in the loop", train(loader, executor, args), least)
    with open_loader(documents, args, 0) as loader:
        times = train(loader, executor, args)
        report("without look-ahead", times, least)
        plan = loader.metrics.snapshot()["plan_seconds_p50"]
    longer = times.mean - least
    print(f"\n{planners} planning processes; largest part of a rank: {part_bytes:,} bytes")
    print(f"without look-ahead a step takes {longer:.3f} s longer; a plan takes {plan:.3f} s")


def measure_alone(steps: int) -> None:
    """From `next()` to the data in a single process, when batches are ready."""
    documents, times = Documents("ldc", 5), []
    options = {"lengths": documents.lengths, "too_long": "truncate"}
    with DCPDataLoader(documents, masks.causal, **options) as loader:
        batches = iter(loader)
        next(batches)
        for _ in range(steps):
            sleep(0.15)
            start = perf_counter()
            next(batches)
            times.append(1e3 * (perf_counter() - start))
    print(
        f"one process, 8,192 tokens: next() takes {median(times):.2f} ms (p90 "
        f"{np.percentile(times, 90):.2f}, largest {max(times):.2f})"
    )


if __name__ == "__main__":
    main()
