"""Compares plans for the fewest bytes with the best known placements and the published planner.

    python -m benchmarks.planner_bytes best_known [--verbose]
    python -m benchmarks.planner_bytes published [--limit 12]

Compute is within 1.10 and tokens within 1.20 of the mean; `data/workloads.json` has the lengths.

`best_known`: `data/best_known.json` has, for 81 cases, the fewest forward bytes that any method
found in long runs with one head group. Bytes are counted as there: 4,096 per token of Q and O,
1,024 per token of K and V. Times are CPU milliseconds of the placement alone, after warm-up.

`published`: `data/reference_planner.json` has what the published planner needed on one core, 173
rows: batches of 131,072 tokens, 8 q heads, 2 kv heads, head dim 128, bf16. Ours has
`objective="bytes"` and one head group. MB are 1e6 bytes sent forward, `inter` those between nodes;
seconds are CPU time without the masks. A row is `fair` if the published plan keeps the limits, too.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from time import process_time
from typing import Any

import numpy as np

from benchmarks.cases import DATA, LIMITS, MASKS, SHAPE, cluster, geometric_mean, make_task
from dyncp import Batch, PlannerConfig
from dyncp.blocks import BlockGraph, build_graph
from dyncp.cli.plan import describe_traffic
from dyncp.placement import SOLVERS, Placement, Solver, find_remote_uses, measure_balance
from dyncp.planner import assemble_choice, choose
from dyncp.topology import Topology, preset

EFFORTS = {"fast": "bisection_bytes", "quality": "bisection_bytes_quality"}
HEAD_GROUPS = (1, 2)
Q_AND_OUT, K_AND_V = 4096, 1024  # bytes per token of all heads
CONFIG = PlannerConfig(objective="bytes", limits=LIMITS)
NAMES = {"causal_blockwise": "blockwise", "shared_question": "shared"}
# The rows that are judged: the better of these block sizes by this solver.
JUDGED = ("kahypar", (1024, 2048))
MISSED = 1e-3  # megabytes


@dataclass(frozen=True, slots=True)
class Result:
    ratio: float
    missed: bool
    milliseconds: float


def forward_megabytes(graph: BlockGraph, placement: Placement) -> float:
    groups, total = len(graph.head_groups), 0
    for keys, size in ((False, Q_AND_OUT), (True, K_AND_V)):
        uses = find_remote_uses(graph, placement, "default", keys=keys)
        total += int((graph.blocks.tokens[uses.block].astype(np.int64) * size).sum()) // groups
    return total / 1e6


def topology_of(ranks: int) -> Topology:
    return cluster(ranks // 8) if ranks > 8 else preset("p4de", 1, ranks)


def run_case(solver: Solver, head_groups: int, row: dict[str, Any], verbose: bool) -> Result:
    batch = Batch.of([MASKS[row["mask"]](n) for n in lengths()[row["list"]]])
    graph = build_graph(batch, SHAPE, [row["block_size"]] * len(batch.lengths), head_groups)
    topology = topology_of(row["ranks"])
    solver.place(graph, topology, LIMITS, 0)
    start = process_time()
    placement = solver.place(graph, topology, LIMITS, 0)
    milliseconds = 1e3 * (process_time() - start)
    balance = measure_balance(graph, placement, LIMITS)
    megabytes, best = forward_megabytes(graph, placement), row["best_known_MB"]
    ratio = megabytes / best if best else 1.0
    if verbose:
        case = f"{row['list']} {row['mask']} block {row['block_size']} ranks {row['ranks']}"
        print(
            f"  {case:<40}{megabytes:>9.1f} MB, best known {best:>7.1f}, ratio {ratio:.2f}, "
            f"compute {balance.compute_max_over_mean:.3f}, "
            f"tokens {balance.tokens_max_over_mean:.3f}, {milliseconds:.1f} ms"
        )
    return Result(ratio, bool(balance.reason), milliseconds)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of one plan; megabytes are of forward."""

    megabytes: float
    inter: float
    compute: float
    tokens: float
    seconds: float

    @property
    def in_limits(self) -> bool:
        return not LIMITS.missed(self.compute, self.tokens)

    def at_most(self, other: "Numbers") -> bool:
        return self.megabytes <= other.megabytes + MISSED and self.inter <= other.inter + MISSED

    def __str__(self) -> str:
        return (
            f"{self.megabytes:>8.1f}{self.inter:>8.1f}{self.compute:>7.2f}{self.tokens:>6.2f}"
            f"{self.seconds:>8.3f}"
        )


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    block_size: int
    solver: str
    theirs: Numbers
    ours: Numbers

    def __str__(self) -> str:
        how = f"{self.solver} {self.block_size}"
        verdict = ("yes" if self.ours.at_most(self.theirs) else "NO") if self.fair else ""
        return f"{self.name:<28}{how:<16}{self.theirs} |{self.ours}  {verdict}"

    @property
    def fair(self) -> bool:
        return self.theirs.in_limits


def make_row(row: dict[str, Any]) -> Row:
    mask, nodes = NAMES.get(row["mask"], row["mask"]), row["machines"]
    theirs = Numbers(
        row["forward_bytes"] / 1e6,
        row["forward_inter_machine_bytes"] / 1e6,
        row["compute_max_over_mean"],
        row["tokens_max_over_mean"],
        row["cpu_seconds"]["total_plan"],
    )
    name = f"{row['list']} {mask} {nodes} × 8"
    return Row(name, row["block_size"], row["solver"], theirs, plan(row["list"], mask, nodes))


@cache
def plan(sample: str, mask: str, nodes: int) -> Numbers:
    """Plans the batch twice and times the second plan; the first one warms up."""
    batch = Batch.of([MASKS[mask](n) for n in lengths()[sample]])
    topology = cluster(nodes)
    choose(make_task(batch, CONFIG, topology))
    start = process_time()
    task = make_task(batch, CONFIG, topology)
    choice = choose(task)
    assemble_choice(task, choice)
    seconds = process_time() - start
    candidate = choice.candidate
    forward = [schedule for schedule, _ in candidate.schedules.values()]
    moved = describe_traffic(candidate, topology, forward)
    return Numbers(
        moved["bytes"] / 1e6,
        moved["inter_node_bytes"] / 1e6,
        candidate.balance.compute_max_over_mean,
        candidate.balance.tokens_max_over_mean,
        seconds,
    )


@cache
def lengths() -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads((DATA / "workloads.json").read_text())["lengths"]
    return found


def judge(rows: Sequence[Row]) -> list[Row]:
    """The row with the better block size of every case, if it is fair."""
    solver, sizes = JUDGED
    own = [r for r in rows if r.solver == solver and r.block_size in sizes]
    by_case: dict[str, list[Row]] = {}
    for row in own:
        by_case.setdefault(row.name, []).append(row)
    best = [min(found, key=lambda r: r.theirs.megabytes) for found in by_case.values()]
    return [row for row in best if row.fair]


def summarise(rows: Sequence[Row]) -> None:
    fair, judged = [r for r in rows if r.fair], judge(rows)
    for what, own in (
        ("all fair rows", fair),
        ("default solver, better of two block sizes", judged),
    ):
        kept = [r for r in own if r.ours.at_most(r.theirs)]
        total = [r for r in own if r.ours.megabytes <= r.theirs.megabytes + MISSED]
        print(
            f"{what}: ours at most theirs, in all and between nodes, in {len(kept)} of "
            f"{len(own)} (in all {len(total)})"
        )
        for row in own:
            if row not in kept:
                print(f"  not: {row}")
    ratios = [r.theirs.seconds / r.ours.seconds for r in rows]
    missed = sum(not r.ours.in_limits for r in rows)
    bytes_ratio = [r.ours.megabytes / r.theirs.megabytes for r in fair if r.ours.megabytes]
    print(
        f"{len(rows)} rows, {len(fair)} fair; ours misses the limits in {missed}; ours / theirs "
        f"bytes in fair rows: geometric mean {geometric_mean(bytes_ratio):.2f}; CPU time of theirs "
        f"/ ours: geometric mean {geometric_mean(ratios):.0f}, least {min(ratios):.0f}"
    )


def run_best_known(args: argparse.Namespace) -> None:
    rows = json.loads((DATA / "best_known.json").read_text())["rows"]
    print(f"{'bytes / best known':<26}{'mean':>7}{'worst':>7}{'limits kept':>13}{'median ms':>11}"
          f"{'worst ms':>10}")  # fmt: skip
    for effort, name in EFFORTS.items():
        if name not in SOLVERS:
            print(f"{effort}: there is no solver {name}")
            continue
        for groups in HEAD_GROUPS:
            found = [run_case(SOLVERS[name], groups, row, args.verbose) for row in rows]
            ratios, times = [r.ratio for r in found], [r.milliseconds for r in found]
            kept = f"{sum(not r.missed for r in found)} of {len(found)}"
            what = f"{effort}, {groups} head group{'s' if groups > 1 else ''}"
            print(
                f"{what:<26}{geometric_mean(ratios):>7.3f}{max(ratios):>7.2f}{kept:>13}"
                f"{np.median(times):>11.1f}{max(times):>10.1f}", flush=True
            )  # fmt: skip


def run_published(args: argparse.Namespace) -> None:
    found = json.loads((DATA / "reference_planner.json").read_text())["rows"][: args.limit]
    numbers = f"{'MB':>8}{'inter':>8}{'comp.':>7}{'tok.':>6}{'CPU s':>8}"
    print(
        f"{'published planner | ours':<28}{'solver, block':<16}{numbers} |{numbers}  ours at most"
    )
    rows = []
    for entry in found:
        rows.append(make_row(entry))
        print(rows[-1], flush=True)
    print()
    summarise(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = parser.add_subparsers(required=True)
    best_known = tables.add_parser("best_known")
    best_known.add_argument("--verbose", action="store_true", help="every case")
    best_known.set_defaults(run=run_best_known)
    published = tables.add_parser("published")
    published.add_argument("--limit", type=int, help="only the first rows")
    published.set_defaults(run=run_published)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
