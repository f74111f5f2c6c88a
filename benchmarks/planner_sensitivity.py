"""How many wins over static methods survive when the cluster is not as assumed.

    python -m benchmarks.planner_sensitivity [--model llama3_8b] [--lists ldc,single]

The cases of planner_time with seed 0. For every changed cluster: `as planned` simulates the plan
that was made for the nominal one, `planned anew` plans for the changed one. Both stand against the
static method that is best on the changed cluster, at its best DP × CP split. A win is a step that
is no longer than that; ties within 0.5 % count as such.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.cases import (
    LISTS,
    Case,
    cluster,
    geometric_mean,
    list_cases,
    make_task,
    run_statics,
)
from dyncp.cost import ModelConfig, find_model
from dyncp.planner import choose
from dyncp.topology import Topology

TIE = 0.005
JITTER, JITTER_SEEDS = 0.05, (0, 1, 2)


def changed_clusters() -> dict[str, Topology]:
    nominal = cluster()
    return {
        "nominal": nominal,
        "bandwidths × 0.5": nominal.scaled(bandwidth=0.5),
        "bandwidths × 2": nominal.scaled(bandwidth=2.0),
        "latencies × 4": nominal.scaled(latency=4.0),
    } | {f"jitter 5 %, seed {seed}": nominal.jittered(JITTER, seed) for seed in JITTER_SEEDS}


@dataclass(frozen=True, slots=True)
class Ratios:
    """The best static method's step over ours."""

    as_planned: float
    planned_anew: float


def run_case(
    case: Case, clusters: Mapping[str, Topology], model: ModelConfig | None
) -> dict[str, Ratios]:
    batch = case.batch()
    task = make_task(batch, model=model)
    ours, statics = choose(task).candidate, [s.candidate for s in run_statics(task)]
    ratios = {}
    for name, topology in clusters.items():
        changed = replace(task, topology=topology)
        best = min(changed.simulate(static).step_seconds for static in statics)
        anew = choose(make_task(batch, topology=topology, model=model)).simulated
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
    return f"{name:<22}" + "   ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="adds the per-token work, as in llama3_8b")
    parser.add_argument("--lists", default=",".join(LISTS))
    args = parser.parse_args()
    model = None if args.model is None else find_model(args.model)
    clusters = changed_clusters()
    cases = list_cases([0], args.lists.split(","))
    results = [run_case(case, clusters, model) for case in cases]
    columns = f"{'wins':>24}{'mean':>7}{'worst':>7}"
    print(f"{args.model or 'attention alone'}; best static / ours")
    print(f"{'':<22}{'as planned':<38}   planned anew")
    print(f"{'':<22}{columns}   {columns}")
    for name in clusters:
        print(draw_row(name, [result[name] for result in results]))


if __name__ == "__main__":
    main()
