"""Measures how good plans are when the cluster or the cost model is not as assumed.

    python -m benchmarks.planner_sensitivity cluster [--model llama3_8b] [--lists ldc,single]
    python -m benchmarks.planner_sensitivity whole_calls
    python -m benchmarks.planner_sensitivity prices

`cluster`: the cases of planner_time with seed 0. For every changed cluster, `as planned` simulates
the plan that was made for the nominal one, `planned anew` plans for the changed one. Both are
compared with the static method that is best on the changed cluster, at its best DP × CP split. A
win is a step that is no longer than that; ties within 0.5 % count as wins.

`whole_calls`: h200, 4 nodes × 8 ranks, 131,072 tokens, 32 q heads, 8 kv heads, head dim 128,
bf16. Every batch is planned twice: with a cost model of kernels (plus 10 µs each) and messages
only, and with one of whole calls. Both plans are simulated as whole calls, with graphs and without.
Columns have the largest numbers of launches / waits / divisions of a rank, forward and backward,
and the milliseconds of a layer.

`prices`: the cases of planner_time, attention alone, on p4de. Every batch is planned by kernels and
messages (as p4de was priced once) and by whole calls. `price` is what the true price adds to the
first plan, `plan` the second plan's step over the first's, both at the true price.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.cases import (
    LISTS,
    MASKS,
    TOKENS,
    Case,
    cluster,
    geometric_mean,
    list_cases,
    make_task,
    run_statics,
)
from dyncp import AttentionShape, Batch
from dyncp.cost import CostModel, ModelConfig, find_model, find_profile
from dyncp.plan import Op
from dyncp.planner import PERTURBATIONS, Task, choose
from dyncp.samplers import parse_sample, sample_lengths
from dyncp.simulate import AttentionTimes, Simulated
from dyncp.topology import Topology, preset

TIE = 0.005
JITTER, JITTER_SEEDS = 0.05, (0, 1, 2)
SAMPLES = ("ldc:0", "training_documents:1", "ldc_x0.25:0")
SHAPE, TOPOLOGY, PROFILE = AttentionShape(32, 8, 128), preset("h200", 4), find_profile("h200")
FREE = {
    "launch_seconds": 0.0,
    "host_seconds": 0.0,
    "host_seconds_eager": 0.0,
    "overlap_slowdown": 1.0,
}
# A cost model of kernels and messages only.
KERNELS = replace(
    PROFILE,
    **FREE,
    call_seconds=10e-6,
)


# p4de as it was priced before rows, edges, launches, row work and the host were.
ONCE = replace(
    find_profile("p4de"),
    attention_forward=190e12,
    attention_backward=150e12,
    copy=0.8e12,
    call_seconds=20e-6,
    edge_forward=1.0,
    edge_backward=1.0,
    row_forward=0.0,
    row_backward=0.0,
    lanes=0,
    **FREE,
)


def on(topology: Topology) -> Callable[[Task], Task]:
    return lambda task: replace(task, topology=topology)


def changed_clusters() -> dict[str, Callable[[Task], Task]]:
    nominal = cluster()
    return {
        "nominal": on(nominal),
        **PERTURBATIONS,
        "bandwidths × 2": on(nominal.scaled(bandwidth=2.0)),
        "latencies × 4": on(nominal.scaled(latency=4.0)),
    } | {f"jitter 5 %, seed {seed}": on(nominal.jittered(JITTER, seed)) for seed in JITTER_SEEDS}


@dataclass(frozen=True, slots=True)
class Ratios:
    """The best static method's step over ours."""

    as_planned: float
    planned_anew: float


def run_case(
    case: Case, clusters: Mapping[str, Callable[[Task], Task]], model: ModelConfig | None
) -> dict[str, Ratios]:
    batch = case.batch()
    task = make_task(batch, model=model)
    ours, statics = choose(task).candidate, [s.candidate for s in run_statics(task)]
    ratios = {}
    for name, change in clusters.items():
        changed = change(task)
        best = min(changed.simulate(static).step_seconds for static in statics)
        anew = choose(changed).simulated
        ratios[name] = Ratios(best / changed.simulate(ours).step_seconds, best / anew.step_seconds)
    return ratios


def draw_row(name: str, found: Sequence[Ratios]) -> str:
    cells = []
    for ratios in ([r.as_planned for r in found], [r.planned_anew for r in found]):
        wins, strict = (
            sum(r > 1 - TIE for r in ratios),
            sum(r > 1 + TIE for r in ratios),
        )
        cells.append(
            f"{wins:>4} of {len(ratios)} ({strict:>2} by more){geometric_mean(ratios):>7.2f}"
            f"{min(ratios):>7.2f}"
        )
    return f"{name:<34}" + "   ".join(cells)


def most(times: AttentionTimes) -> str:
    programs = times.flow.programs
    counts = (np.add.reduceat(programs.op == op, programs.first[:-1]).max() for op in Op)
    return "/".join(str(int(count)) for count in counts)


def describe(simulated: Simulated) -> str:
    runs = ", ".join(most(times) for times in simulated.attention["default"])
    both = 1e3 * (simulated.forward_seconds + simulated.backward_seconds)
    return f"{runs:<22}{both:>6.2f}"


def run_cluster(args: argparse.Namespace) -> None:
    model = None if args.model is None else find_model(args.model)
    clusters = changed_clusters()
    cases = list_cases([0], args.lists.split(","))
    results = [run_case(case, clusters, model) for case in cases]
    columns = f"{'wins':>24}{'mean':>7}{'worst':>7}"
    print(f"{args.model or 'attention alone'}; best static / ours")
    print(f"{'':<34}{'as planned':<38}   planned anew")
    print(f"{'':<34}{columns}   {columns}")
    for name in clusters:
        print(draw_row(name, [result[name] for result in results]))


def run_whole_calls(_: argparse.Namespace) -> None:
    print(f"{'batch, documents, mask':<40}{'host':<8}{'by kernels, ms':<30}by whole calls, ms")
    for sample in SAMPLES:
        name, seed = parse_sample(sample)
        lengths = sample_lengths(name, TOKENS, seed)
        for mask in ("causal", "lambda"):
            batch = Batch.of([MASKS[mask](length) for length in lengths])
            plain = choose(Task.of(batch, TOPOLOGY, SHAPE, None, CostModel(KERNELS, SHAPE)))
            for graphs in (True, False):
                cost = CostModel(PROFILE, SHAPE, graphs=graphs)
                task = Task.of(batch, TOPOLOGY, SHAPE, None, cost)
                found = [task.simulate(plain.candidate), choose(task).simulated]
                label = f"{sample}, {len(lengths)}, {mask}"
                columns = "  ".join(map(describe, found))
                print(f"{label:<40}{'graphs' if graphs else 'eager':<8}{columns}", flush=True)


def run_prices(_: argparse.Namespace) -> None:
    prices, plans = [], []
    for case in list_cases([0, 1]):
        task = make_task(case.batch())
        before = replace(task, cost=replace(task.cost, profile=ONCE))
        first, second = choose(before).candidate, choose(task).simulated
        price = task.simulate(first).step_seconds
        prices.append(price / first.simulated.step_seconds)
        plans.append(second.step_seconds / price)
        print(f"{case!s:<24} price {prices[-1]:.2f}, plan {plans[-1]:.2f}", flush=True)
    for name, ratios in (("price", prices), ("plan", plans)):
        mean = geometric_mean(ratios)
        print(f"{name}: geometric mean {mean:.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = parser.add_subparsers(required=True)
    cluster = tables.add_parser("cluster")
    cluster.add_argument("--model", help="adds the per-token work, as in llama3_8b")
    cluster.add_argument("--lists", default=",".join(LISTS))
    cluster.set_defaults(run=run_cluster)
    tables.add_parser("whole_calls").set_defaults(run=run_whole_calls)
    tables.add_parser("prices").set_defaults(run=run_prices)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
