"""Placement by `bisection_bytes` beside the best known balanced placements, and planning times.

    python -m benchmarks.planner [--verbose] [--effort fast|quality] [--head-groups 1|2]

`data/best_known.json` has, for 81 cases, the fewest forward bytes that any method found in long
runs with compute within 1.10 and tokens within 1.20 of the mean and one head group;
`data/workloads.json` the lengths.
Bytes are counted as there: 4,096 per token of Q and O, 1,024 per token of K and V. Times are CPU
milliseconds of one plan after warm-up, from lengths and masks to the plans of all ranks.
"""

import argparse
import json
from pathlib import Path
from time import process_time

import numpy as np

from dyncp import AttentionShape, Batch, PlannerConfig, Topology, masks
from dyncp.blocks import BlockGraph, build_graph
from dyncp.masks import MaskFunction
from dyncp.placement import (
    Limits,
    Placement,
    Solver,
    find_remote_uses,
    find_solver,
    measure_balance,
)
from dyncp.plan import Layout
from dyncp.planner import make_candidate

DATA = Path(__file__).parent / "data"
MASKS: dict[str, MaskFunction] = {
    "causal": masks.causal,
    "lambda": masks.lambda_shaped,
    "shared": masks.shared_question,
    "blockwise": masks.causal_blockwise,
}
SHAPE = AttentionShape(8, 2, 128)
LIMITS = Limits(compute_tolerance=0.1, token_tolerance=0.2)


def forward_megabytes(graph: BlockGraph, placement: Placement) -> float:
    tiles, total = graph.tiles["default"], 0
    groups = len(graph.head_groups)
    for blocks, size in ((tiles.q_block, 4096 // groups), (tiles.k_block, 1024 // groups)):
        uses = find_remote_uses(graph, placement, "default", blocks)
        total += int((graph.blocks.tokens[uses.block].astype(np.int64) * size).sum())
    return total / 1e6


def compare_bytes(
    lengths: dict[str, list[int]], solver: Solver, head_groups: int, *, verbose: bool
) -> None:
    rows = json.loads((DATA / "best_known.json").read_text())["rows"]
    ratios, times, missed = [], [], 0
    for row in rows:
        batch = Batch.of([MASKS[row["mask"]](n) for n in lengths[row["list"]]])
        sizes = [row["block_size"]] * len(batch.lengths)
        graph = build_graph(batch, SHAPE, sizes, head_groups)
        topology = Topology(max(1, row["ranks"] // 8), min(8, row["ranks"]))
        solver.place(graph, topology, LIMITS, 0)
        start = process_time()
        placement = solver.place(graph, topology, LIMITS, 0)
        times.append(1e3 * (process_time() - start))
        balance = measure_balance(graph, placement, LIMITS)
        megabytes, best = forward_megabytes(graph, placement), row["best_known_MB"]
        ratios.append(megabytes / best if best else 1.0)
        missed += bool(balance.reason)
        if verbose:
            case = f"{row['list']} {row['mask']} block {row['block_size']} ranks {row['ranks']}"
            print(
                f"{case:<40}{megabytes:>9.1f} MB, best known {best:>7.1f}, ratio {ratios[-1]:.2f}, "
                f"compute {balance.compute_max_over_mean:.3f}, "
                f"tokens {balance.tokens_max_over_mean:.3f}, {times[-1]:.1f} ms"
            )
    print(
        f"{solver.name}, head groups {head_groups}: "
        f"bytes / best known, {len(rows)} cases: geometric mean "
        f"{np.exp(np.mean(np.log(ratios))):.3f}, worst {max(ratios):.2f}; "
        f"limits missed in {missed}; "
        f"placement {np.median(times):.1f} ms median, {max(times):.1f} ms worst"
    )


def time_planning(lengths: dict[str, list[int]]) -> None:
    config, topology = PlannerConfig("bisection", limits=LIMITS), Topology(4, 8)
    print(f"\n{'131,072 tokens, 4 × 8 ranks':<30}{'masks':>8}{'blocks':>8}{'placement':>11}"
          f"{'schedule':>10}{'lower':>8}{'total ms':>10}")  # fmt: skip
    for name in ("ldc", "ldc_x0.5", "ldc_x2", "uniform", "single"):
        for mask, function in MASKS.items():
            for _ in range(2):  # the first one warms up
                start = process_time()
                batch = Batch.of([function(n) for n in lengths[name]])
                built = process_time() - start
                candidate = make_candidate(find_solver("bisection"), batch, topology, SHAPE, config)
                before = process_time()
                candidate.lower(Layout())
                lowered = process_time() - before
                total = process_time() - start
            stages = [built, *candidate.cpu_seconds.values(), lowered, total]
            widths = (8, 8, 11, 10, 8, 10)
            cells = (f"{1e3 * s:>{w}.1f}" for s, w in zip(stages, widths, strict=True))
            print(f"{name + ' ' + mask:<30}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="every case")
    parser.add_argument("--effort", choices=("fast", "quality"), default="fast")
    parser.add_argument("--head-groups", type=int, choices=(1, 2), default=1)
    args = parser.parse_args()
    lengths = json.loads((DATA / "workloads.json").read_text())["lengths"]
    solver = find_solver("bisection_bytes" + ("_quality" if args.effort == "quality" else ""))
    compare_bytes(lengths, solver, args.head_groups, verbose=args.verbose)
    time_planning(lengths)


if __name__ == "__main__":
    main()
