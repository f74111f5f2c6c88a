"""Compares simulated steps of the planner's choice with every static method and the ideal.

    python -m benchmarks.planner_time cluster [--model llama3_8b] [--seeds 0,1] [--lists ldc,single]
    python -m benchmarks.planner_time networks [--networks pcie,ethernet] [--lists ldc] [--seeds 0]

131,072 tokens on 32 ranks, 8 q heads, 2 kv heads, head dim 128, bf16. `ideal` has no communication
and no imbalance; static methods have every DP × CP split.

`cluster`: p4de, 4 nodes × 8 ranks. `paper` is the best of ring, zigzag, loongtrain and
transformer_engine over all 32 ranks, `split` the best of them with every split. The last columns
are planned within compute 1.10 and tokens 1.20 of the mean: `static` is the best static method that
keeps these limits too, and `over` the best that does not. Ratios above 1 say how much slower others
are.

`networks`: attention forward and backward in ms; `ratio` is the best static method over ours,
`planning` the CPU time of the search. `one_link` has NVLink and one 100 Gb/s link per node,
`pcie` 25 GB/s inside nodes and 100 Gb/s per node, `ethernet` 32 nodes of one rank with 25
Gb/s.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from time import process_time

import numpy as np

from benchmarks.cases import (
    FIXED,
    LIMITS,
    LISTS,
    MASKS,
    SHAPE,
    TOKENS,
    Case,
    Static,
    fastest,
    geometric_mean,
    list_cases,
    make_task,
    paper_baselines,
    run_statics,
)
from dyncp import Batch, PlannerConfig
from dyncp.cost import PROFILES, CostModel, ModelConfig, find_model
from dyncp.placement import Balance
from dyncp.planner import Task, choose, search
from dyncp.samplers import sample_lengths
from dyncp.topology import Link, Topology, preset

SPARSE = ("lambda", "blockwise", "shared")
NETWORKS = {
    "one_link": Topology(4, 8, Link(5e-6, 240e9), Link(20e-6, 12.5e9), 1),
    "pcie": Topology(4, 8, Link(10e-6, 25e9), Link(20e-6, 12.5e9), 1),
    "ethernet": Topology(32, 1, Link(30e-6, 3.125e9), Link(30e-6, 3.125e9), 1),
    "p4de": preset("p4de", 4),
    "h200": preset("h200", 4),
}
SLOW = ("one_link", "pcie", "ethernet")
# Mean and standard deviation of the logarithm of lengths, or its range if it is uniform.
LOGNORMAL = {"mixed": (8.2, 1.2), "short": (6.8, 0.9)}
UNIFORM = {"long": (4096, 65536)}
NETWORK_LISTS = ("ldc", "longalign", *LOGNORMAL, *UNIFORM)


@dataclass(frozen=True, eq=False)
class Result:
    """One case: seconds of our step, with and without limits, and all static methods."""

    case: Case
    ideal: float
    ours: float
    solver: str
    balance: Balance
    limited: float
    missed: float
    statics: list[Static]

    @property
    def static(self) -> Static:
        return fastest(self.statics)

    def ratio(self, others: Sequence[Static]) -> float:
        return fastest(others).seconds / self.ours

    @property
    def paper(self) -> float:
        return self.ratio(paper_baselines(self.statics, 32))

    @property
    def split(self) -> float:
        return self.ratio(paper_baselines(self.statics))

    def limited_ratio(self, *, in_limits: bool) -> float | None:
        """The step of the best static method that keeps (or misses) the limits, over our step that
        keeps them."""
        others = [s for s in self.statics if s.in_limits is in_limits]
        return fastest(others).seconds / self.limited if others else None


def run_case(case: Case, model: ModelConfig | None) -> Result:
    batch = case.batch()
    task = make_task(batch, model=model)
    choice = choose(task)
    limited = choose(make_task(batch, PlannerConfig(limits=LIMITS), model=model))
    return Result(
        case,
        choice.simulated.ideal_seconds,
        choice.simulated.step_seconds,
        choice.candidate.placement.solver,
        choice.candidate.balance,
        limited.simulated.step_seconds,
        limited.candidate.balance.missed,
        list(run_statics(task)),
    )


HEADER = (
    f"{'list, mask, seed':<24}{'ideal':>9}{'ours ms':>9}{'/ideal':>7}  {'solver':<27}"
    f"{'best static':<27}{'ratio':>6}{'paper':>7}{'split':>6} |{'limits ms':>10}"
    f"{'static':>7}{'over':>6}"
)


def draw_row(result: Result) -> str:
    ours, static = result.ours, result.static
    within, over = (result.limited_ratio(in_limits=kept) for kept in (True, False))
    name = str(result.case).removesuffix(" 0") if result.case.sample in FIXED else str(result.case)
    return (
        f"{name:<24}{1e3 * result.ideal:>9.2f}{1e3 * ours:>9.2f}{ours / result.ideal:>7.2f}  "
        f"{result.solver:<27}{static.name:<27}{static.seconds / ours:>6.2f}{result.paper:>7.2f}"
        f"{result.split:>6.2f} |{1e3 * result.limited:>9.2f}{'!' if result.missed else ' '}"
        f"{_number(within):>7}{_number(over):>6}"
    )


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def summarise(results: Sequence[Result]) -> None:
    ratios = [r.ratio(r.statics) for r in results]
    above = [r.ours / r.ideal for r in results]
    worst = results[ratios.index(min(ratios))].case
    print(f"ours / ideal: geometric mean {geometric_mean(above):.2f}, worst {max(above):.2f}")
    print(
        f"best static / ours: geometric mean {geometric_mean(ratios):.3f}, worst {min(ratios):.4f} "
        f"({worst}); faster in {sum(r > 1 + 1e-9 for r in ratios)} of {len(results)}, equal in "
        f"{sum(abs(r - 1) <= 1e-9 for r in ratios)}, slower in {sum(r < 1 - 1e-9 for r in ratios)}"
    )
    print(
        f"max/mean without limits: compute at most "
        f"{max(r.balance.compute_max_over_mean for r in results):.2f}, tokens at most "
        f"{max(r.balance.tokens_max_over_mean for r in results):.2f}"
    )
    _summarise_limits(results)
    _summarise_paper(results)


def _summarise_limits(results: Sequence[Result]) -> None:
    within = [x for r in results if (x := r.limited_ratio(in_limits=True)) is not None]
    over = [x for r in results if (x := r.limited_ratio(in_limits=False)) is not None]
    print(
        f"with limits: kept in {sum(not r.missed for r in results)} of {len(results)}; best static "
        f"that keeps them / ours: geometric mean {geometric_mean(within):.3f}, worst "
        f"{min(within):.4f}; in {sum(x < 1 for x in over)} cases a static method that misses them "
        f"is faster (at most {1 / min(over):.2f}×)"
    )


def _summarise_paper(results: Sequence[Result]) -> None:
    """Compares with the paper's baselines."""
    for name, own in (
        ("causal, long-tailed × 0.5", [r for r in results if str(r.case).startswith("ldc_x0.5 c")]),
        ("causal", [r for r in results if r.case.mask == "causal"]),
        ("sparse", [r for r in results if r.case.mask in SPARSE]),
    ):
        if not own:
            continue
        paper, split = [r.paper for r in own], [r.split for r in own]
        print(
            f"paper's baselines / ours, {name}: over all ranks {min(paper):.2f} to {max(paper):.2f}"
            f" (geometric mean {geometric_mean(paper):.2f}), with their best split "
            f"{min(split):.2f} to {max(split):.2f} ({geometric_mean(split):.2f})"
        )


def draw_lengths(name: str, seed: int) -> list[int]:
    """Lengths from a sampler by its name, or drawn from a distribution of this file."""
    if name not in LOGNORMAL and name not in UNIFORM:
        return list(sample_lengths(name, TOKENS, seed))
    random, lengths, left = np.random.default_rng(seed), [], TOKENS
    while left:
        if name in LOGNORMAL:
            drawn = random.lognormal(*LOGNORMAL[name])
        else:
            drawn = np.exp(random.uniform(*np.log(UNIFORM[name])))
        lengths.append(min(max(int(drawn), 16), left))
        left -= lengths[-1]
    return lengths


def make_network_task(network: str, name: str, mask: str, seed: int) -> Task:
    topology = NETWORKS[network]
    cost = CostModel(PROFILES.get(topology.name, PROFILES["p4de"]), SHAPE)
    batch = Batch.of([MASKS[mask](length) for length in draw_lengths(name, seed)])
    return Task.of(batch, topology, SHAPE, cost=cost)


def run_on_network(network: str, name: str, mask: str, seed: int) -> tuple[float, bool]:
    """The step of the best static method over ours, and whether ours is dynamic."""
    task = make_network_task(network, name, mask, seed)
    start = process_time()
    found = search(task)
    planning = process_time() - start
    static = fastest(list(run_statics(make_network_task(network, name, mask, seed))))
    ours, ideal = found.simulated.step_seconds, found.simulated.ideal_seconds
    placement, ratio = found.candidate.placement, static.seconds / ours
    print(
        f"{network:9} {name:10} {mask:10} {seed:4} {1e3 * ideal:8.2f} {1e3 * ours:8.2f} "
        f"{placement.solver:26} {1e3 * static.seconds:8.2f} {static.name:26} {ratio:6.2f} "
        f"{1e3 * planning:6.0f} ms",
        flush=True,
    )
    return ratio, not placement.static


def run_cluster(args: argparse.Namespace) -> None:
    model = None if args.model is None else find_model(args.model)
    print(f"simulated step, {args.model or 'attention alone, one layer'}\n{HEADER}")
    results = []
    for case in list_cases(integers(args.seeds), args.lists.split(",")):
        results.append(run_case(case, model))
        print(draw_row(results[-1]), flush=True)
    print()
    summarise(results)


def run_networks(args: argparse.Namespace) -> None:
    run_on_network("p4de", "ldc", "causal", 0)  # compiles
    print("network   lengths    mask       seed    ideal     ours", end=" ")
    print(f"{'choice':26} {'static':>8} {'method':26} {'ratio':>6} planning")
    for network in args.networks.split(","):
        results = [
            run_on_network(network, name, mask, seed)
            for name in args.lists.split(",")
            for mask in args.masks.split(",")
            for seed in integers(args.seeds)
        ]
        ratios, dynamic = zip(*results, strict=True)
        print(
            f"{network}: ratio {geometric_mean(ratios):.2f} in the geometric mean, "
            f"{min(ratios):.2f} at least; dynamic in {sum(dynamic)} of {len(dynamic)}"
        )


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = parser.add_subparsers(required=True)
    cluster = tables.add_parser("cluster")
    cluster.add_argument("--model", help="adds the per-token work, as in llama3_8b")
    cluster.add_argument("--seeds", default="0,1")
    cluster.add_argument("--lists", default=",".join(LISTS))
    cluster.set_defaults(run=run_cluster)
    networks = tables.add_parser("networks")
    networks.add_argument("--networks", default=",".join(SLOW))
    networks.add_argument("--lists", default=",".join(NETWORK_LISTS))
    networks.add_argument("--masks", default=",".join(MASKS))
    networks.add_argument("--seeds", default="0")
    networks.set_defaults(run=run_networks)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
