"""Placements of the fewest bytes beside the best known ones.

    python -m benchmarks.planner_bytes [--verbose]

`data/best_known.json` has, for 81 cases, the fewest forward bytes that any method found in long
runs with one head group, compute within 1.10 and tokens within 1.20 of the mean;
`data/workloads.json` has the lengths. Bytes are counted as there: 4,096 per token of Q and O, 1,024
per token of K and V. Times are CPU milliseconds of the placement alone, after warm-up.
"""

import argparse
import json
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np

from benchmarks.cases import DATA, LIMITS, MASKS, SHAPE, cluster, geometric_mean
from dyncp import Batch
from dyncp.blocks import BlockGraph, build_graph
from dyncp.placement import SOLVERS, Placement, Solver, find_remote_uses, measure_balance
from dyncp.topology import Topology, preset

EFFORTS = {"fast": "bisection_bytes", "quality": "bisection_bytes_quality"}
HEAD_GROUPS = (1, 2)
Q_AND_OUT, K_AND_V = 4096, 1024  # bytes per token of all heads


@dataclass(frozen=True, slots=True)
class Result:
    ratio: float
    missed: bool
    milliseconds: float


def forward_megabytes(graph: BlockGraph, placement: Placement) -> float:
    tiles, groups, total = graph.tiles["default"], len(graph.head_groups), 0
    for blocks, size in ((tiles.q_block, Q_AND_OUT), (tiles.k_block, K_AND_V)):
        uses = find_remote_uses(graph, placement, "default", blocks)
        total += int((graph.blocks.tokens[uses.block].astype(np.int64) * size).sum()) // groups
    return total / 1e6


def topology_of(ranks: int) -> Topology:
    return cluster(ranks // 8) if ranks > 8 else preset("p4de", 1, ranks)


def run_case(
    solver: Solver, head_groups: int, row: dict[str, Any], lengths: list[int], verbose: bool
) -> Result:
    batch = Batch.of([MASKS[row["mask"]](n) for n in lengths])
    graph = build_graph(batch, SHAPE, [row["block_size"]] * len(lengths), head_groups)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verbose", action="store_true", help="every case")
    verbose = parser.parse_args().verbose
    rows = json.loads((DATA / "best_known.json").read_text())["rows"]
    lengths = json.loads((DATA / "workloads.json").read_text())["lengths"]
    print(f"{'bytes / best known':<26}{'mean':>7}{'worst':>7}{'limits kept':>13}{'median ms':>11}"
          f"{'worst ms':>10}")  # fmt: skip
    for effort, name in EFFORTS.items():
        if name not in SOLVERS:
            print(f"{effort}: there is no solver {name}")
            continue
        for groups in HEAD_GROUPS:
            found = [run_case(SOLVERS[name], groups, r, lengths[r["list"]], verbose) for r in rows]
            ratios, times = [r.ratio for r in found], [r.milliseconds for r in found]
            kept = f"{sum(not r.missed for r in found)} of {len(found)}"
            what = f"{effort}, {groups} head group{'s' if groups > 1 else ''}"
            print(
                f"{what:<26}{geometric_mean(ratios):>7.3f}{max(ratios):>7.2f}{kept:>13}"
                f"{np.median(times):>11.1f}{max(times):>10.1f}", flush=True
            )  # fmt: skip


if __name__ == "__main__":
    main()
