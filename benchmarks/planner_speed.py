"""Times planning: CPU milliseconds from lengths and masks to the plans of all ranks.

    python -m benchmarks.planner_speed [--only table|curve|large|first|stages] [--repeats 3]

Forward and backward, default config, 8 q heads, 2 kv heads, head dim 128, one core. `table` has
131,072 tokens on p4de, 4 × 8 ranks; `curve` long-tailed tokens, 4,096 for every rank; `large` the
largest batches, each in a separate process (`short` are 10,000 documents of 5 to 59 tokens);
`first` the first plan of a new process, with an empty and a filled compile cache; `stages` the
stages that the docs quote (pair counts, mask_mods, simulation, checks, bytes of a part),
131,072 tokens on 4 × 8 ranks, best of three.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, pairwise
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.cases import LISTS, MASKS, TOKENS, Case, cluster, make_task
from dyncp import Batch, PlannerConfig, masks
from dyncp.masks import count_tile_pairs
from dyncp.plan import encode_part
from dyncp.planner import assemble_choice, choose
from dyncp.verify import check_plan

TOKENS_PER_RANK = 4096
BARS = {"single": 150}
LONG_TAILED_BAR = 60
# Tokens, nodes, sample and mask, number of plans (the fastest is shown), target seconds.
LARGE = (
    (2**20, 8, "ldc causal", 3, 0.5),
    (2**20, 8, "single causal", 3, 0.5),
    (2**20, 128, "single causal", 1, 5),
    (320_000, 4, "short mixed", 3, 0.5),
    (2**24, 128, "ldc causal", 1, 20),
    (2**24, 128, "ldc shared", 1, 20),
)
NEEDED: dict[str, dict[str, Any]] = {
    "prefix_lm": {"prefix": 1000},
    "document_packed": {"documents": [1024] * 128},
    "prefix_tree": {"parents": [-1, *[0] * 127], "lengths": [1024] * 128},
}


@dataclass(frozen=True, slots=True)
class Times:
    """CPU seconds of the stages, and what came out."""

    masks: float
    choose: float
    lower: float
    tiles: int
    solver: str

    @property
    def total(self) -> float:
        return self.masks + self.choose + self.lower


class ShortDocuments(Case):
    """10,000 documents of 5 to 59 tokens, with all masks round robin."""

    def batch(self) -> Batch:
        lengths = np.random.default_rng(self.seed).integers(5, 60, 10_000).tolist()
        return Batch.of([mask(n) for mask, n in zip(cycle(MASKS.values()), lengths, strict=False)])


def time_plan(case: Case, nodes: int = 4) -> Times:
    marks = [process_time()]
    batch = case.batch()
    marks.append(process_time())
    task = make_task(batch, topology=cluster(nodes))
    choice = choose(task)
    marks.append(process_time())
    assemble_choice(task, choice)
    marks.append(process_time())
    tiles = sum(map(len, choice.candidate.graph.tiles.values()))
    stages = (after - before for before, after in pairwise(marks))
    return Times(*stages, tiles, choice.candidate.placement.solver)


def best_time(case: Case, nodes: int = 4, repeats: int = 3) -> Times:
    """The times of the fastest of several plans, after warm-up."""
    time_plan(Case("ldc", "causal"))
    return min((time_plan(case, nodes) for _ in range(repeats)), key=lambda times: times.total)


def draw_table(repeats: int) -> None:
    print(f"{'131,072 tokens, 4 × 8 ranks':<28}{'masks':>8}{'choose':>8}{'plans':>8}{'sum ms':>8}"
          f"{'bar':>6}{'tiles':>9}  solver")  # fmt: skip
    for sample in LISTS:
        for mask in MASKS:
            times, bar = best_time(Case(sample, mask), repeats=repeats), BARS.get(sample)
            stages = (times.masks, times.choose, times.lower, times.total)
            print(
                f"{sample + ' ' + mask:<28}" + "".join(f"{1e3 * s:>8.1f}" for s in stages)
                + f"{bar or LONG_TAILED_BAR:>6}{times.tiles:>9,}  {times.solver}", flush=True
            )  # fmt: skip


def draw_curve(repeats: int) -> None:
    print(f"\n{'long-tailed, causal':<28}{'ranks':>8}{'tiles':>10}{'sum ms':>9}{'µs/tile':>9}")
    for exponent in range(16, 23):
        tokens = 2**exponent
        ranks = tokens // TOKENS_PER_RANK
        times = best_time(Case("ldc", "causal", tokens=tokens), ranks // 8, repeats)
        print(
            f"{tokens:>13,} tokens{'':<8}{ranks:>8}{times.tiles:>10,}{1e3 * times.total:>9.0f}"
            f"{1e6 * times.total / times.tiles:>9.1f}", flush=True
        )  # fmt: skip


def draw_large() -> None:
    print()
    for tokens, nodes, what, repeats, bar in LARGE:
        options = f"--repeats {repeats} --large {tokens} {nodes} {what}"
        found = _run_apart(*options.split())
        print(f"{tokens:,} tokens on {nodes} × 8 ranks, {what}: {found} (bar {bar} s)")


def plan_large(tokens: int, nodes: int, sample: str, mask: str, repeats: int) -> None:
    """Prints CPU seconds and peak memory of one plan, after a small plan that warms up."""
    make = ShortDocuments if sample == "short" else Case
    times = best_time(make(sample, mask, tokens=tokens), nodes, repeats)
    memory = getrusage(RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{times.total:.2f} s of CPU (masks {times.masks:.2f}, choose {times.choose:.2f}, lower "
        f"{times.lower:.2f}), {memory:.1f} GiB at most, {times.tiles:,} tiles"
    )


def draw_first() -> None:
    print()
    with tempfile.TemporaryDirectory() as folder:
        for cache, bar in (("empty", 10), ("filled", 1)):
            found = _run_apart("--first", cache_folder=folder)
            print(f"first plan of a process, compile cache {cache}: {found} (bar {bar} s)")


def plan_first(start: float) -> None:
    before = process_time()
    time_plan(Case("ldc", "causal"))
    print(
        f"{process_time() - before:.2f} s of CPU, {perf_counter() - start:.2f} s passed; importing "
        f"took {before:.2f} s of CPU before"
    )


def _run_apart(*options: str, cache_folder: str | None = None) -> str:
    """The output of this module with `options` in a separate process."""
    own = {} if cache_folder is None else {"NUMBA_CACHE_DIR": cache_folder}
    command = [sys.executable, "-m", "benchmarks.planner_speed", *options]
    done = subprocess.run(
        command, env=os.environ | own, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def best(run: Callable[[], object], repeats: int = 3) -> float:
    """Fewest milliseconds."""

    def once() -> float:
        start = perf_counter()
        run()
        return 1e3 * (perf_counter() - start)

    return min(once() for _ in range(repeats))


def time_masks() -> None:
    print("\ncount_tile_pairs, blocks of 1,024:")
    for name, function in masks.BUILTIN.items():
        mask = function(TOKENS, **NEEDED.get(name, {}))
        print(f"  {name:<20}{best(lambda mask=mask: count_tile_pairs(mask, 1024)):8.1f} ms")
    took = best(lambda: masks.from_mask_mod(lambda _b, _h, q, k: q >= k, 16_384), 1)
    print(f"from_mask_mod, 16,384 tokens: {took:.0f} ms")


def time_plans() -> None:
    print(f"\n{'simulation, check, largest part':<34}{'tiles':>8}{'ms':>9}{'ms':>9}{'bytes':>9}")
    for sample in ("ldc", "single"):
        batch = Case(sample, "causal").batch()
        for solver in ("owner_computes", "bisection", "zigzag"):
            task = make_task(batch, PlannerConfig(solver))
            choice = choose(task)
            plan, candidate = assemble_choice(task, choice), choice.candidate
            simulated = best(lambda task=task, made=candidate: task.simulate(made))
            checked = best(lambda plan=plan, batch=batch: check_plan(plan, batch), 1)
            largest = max(len(encode_part(part)) for part in plan.parts)
            tiles = len(candidate.graph.tiles["default"])
            name = f"{sample} causal, {solver}"
            print(f"{name:<34}{tiles:>8,}{simulated:>9.1f}{checked:>9.0f}{largest:>9,}")


def main() -> None:
    start = perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("table", "curve", "large", "first", "stages"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--large", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.large:
        tokens, nodes, sample, mask = args.large
        plan_large(int(tokens), int(nodes), sample, mask, args.repeats)
        return
    if args.first:
        plan_first(start)
        return
    if args.only in (None, "table"):
        draw_table(args.repeats)
    if args.only in (None, "curve"):
        draw_curve(args.repeats)
    if args.only in (None, "large"):
        draw_large()
    if args.only in (None, "first"):
        draw_first()
    if args.only in (None, "stages"):
        time_masks()
        time_plans()


if __name__ == "__main__":
    main()
