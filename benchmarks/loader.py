"""Time per training step with the loader: planned ahead, without look-ahead, and precomputed.

    python -m benchmarks.loader
    python -m benchmarks.loader --steps 40 --sample single --solver auto --busy

This process is rank 0 of 32 (4 machines × 8). Its one planning process plans every batch of 131,072
tokens, which 32 ranks would take turns at. A step waits 0.5 s, as for a GPU (--busy: computes with
one thread). The precomputed run takes the same batches from a list.
"""

import argparse
from collections.abc import Iterable
from statistics import mean, median
from time import perf_counter, sleep
from typing import Any

import torch

from dyncp import AttentionShape, DCPDataLoader, PlannerConfig, masks
from dyncp.dataloader import LoaderConfig
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.samplers import sample_lengths
from dyncp.topology import preset

TOKENS = 131_072


class Documents:
    """Documents whose lengths follow a distribution, batch after batch."""

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


def train(batches: Iterable[Any], seconds: float, *, busy: bool) -> list[float]:
    """Seconds of every step, from asking for its batch to asking for the next one."""
    times = []
    start = perf_counter()
    for _ in batches:
        compute(seconds) if busy else sleep(seconds)
        now = perf_counter()
        times.append(now - start)
        start = now
    return times


def compute(seconds: float) -> None:
    matrix = torch.ones(256, 256)
    end = perf_counter() + seconds
    while perf_counter() < end:
        matrix @ matrix


def open_loader(documents: Documents, args: argparse.Namespace, depth: int) -> DCPDataLoader:
    return DCPDataLoader(
        documents,
        masks.by_name(args.mask),
        model=AttentionShape(8, 2, 128),
        group=LoaderRanks(rank=0, num_ranks=32),
        topology=preset("p4de", 4),
        planner=PlannerConfig(args.solver),
        batch_sampler=documents.batches,
        lengths=documents.lengths,
        look_ahead=depth,
    )


def report(name: str, times: list[float], least: float, note: str = "") -> float:
    later = times[1:]
    print(
        f"{name:<22}{times[0]:9.3f}{median(later):9.4f}{mean(later):9.4f}{max(later):9.3f}"
        f"{mean(later) / least:9.4f}  {note}",
        flush=True,
    )
    return mean(later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a step (default 0.5)")
    parser.add_argument("--sample", default="ldc", help="distribution of lengths (default ldc)")
    parser.add_argument("--mask", default="causal")
    parser.add_argument("--solver", default=PlannerConfig().solver)
    parser.add_argument("--look-ahead", type=int, default=LoaderConfig().look_ahead)
    parser.add_argument("--busy", action="store_true", help="compute instead of waiting")
    args = parser.parse_args()
    torch.set_num_threads(1)
    documents = Documents(args.sample, args.steps)
    print(f"{args.steps} batches of {TOKENS:,} tokens ({args.sample}, {args.mask}), 32 ranks,")
    print(f"solver {args.solver}, steps of {args.seconds:g} s, 1 planning process\n")
    print(f"{'seconds per step':<22}{'first':>9}{'median':>9}{'mean':>9}{'largest':>9}{'ratio':>9}")
    with open_loader(documents, args, args.look_ahead) as loader:
        precomputed = list(loader)
        planning = loader.metrics.snapshot()
    times = train(precomputed, args.seconds, busy=args.busy)
    least = report("precomputed", times, mean(times[1:]))
    with open_loader(documents, args, args.look_ahead) as loader:
        times = train(loader, args.seconds, busy=args.busy)
        report(f"look-ahead {args.look_ahead}", times, least, loader.metrics.line())
        ahead = loader.metrics.snapshot()
    with open_loader(documents, args, 0) as loader:
        times = train(loader, args.seconds, busy=args.busy)
        none = report("without look-ahead", times, least)
        plan = mean(loader.metrics.plan_times()[1:])
    print(
        f"\nwithout look-ahead a step takes {none - least:.3f} s longer; a plan takes {plan:.3f} s"
    )
    print(f"largest part of a rank: {max(planning['part_bytes'], ahead['part_bytes']):,} bytes")


if __name__ == "__main__":
    main()
