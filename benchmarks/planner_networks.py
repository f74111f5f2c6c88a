"""Simulated step times on slow and fast networks: the planner's choice beside every static method.

    python -m benchmarks.planner_networks [--networks pcie,ethernet] [--lists ldc,mixed] [--seeds 0]

32 ranks, 131,072 tokens, 8 q heads, 2 kv heads, head dim 128, bf16; attention forward and backward
in ms. `ideal` has no communication and no imbalance, `ratio` is the best static method over ours,
`planning` the CPU time of the search. Networks: `one_link` has NVLink and one 100 Gb/s link per
machine, `pcie` 25 GB/s inside machines and 100 Gb/s per machine, `ethernet` 32 machines of one rank
with 25 Gb/s.
"""

import argparse
from time import process_time

import numpy as np

from benchmarks.cases import MASKS, SHAPE, TOKENS, fastest, geometric_mean, run_statics
from dyncp import Batch
from dyncp.cost import PROFILES, CostModel
from dyncp.planner import Task, search
from dyncp.samplers import sample_lengths
from dyncp.topology import Link, Topology, preset

NETWORKS = {
    "one_link": Topology(4, 8, Link(5e-6, 240e9), Link(20e-6, 12.5e9), 1),
    "pcie": Topology(4, 8, Link(10e-6, 25e9), Link(20e-6, 12.5e9), 1),
    "ethernet": Topology(32, 1, Link(30e-6, 3.125e9), Link(30e-6, 3.125e9), 1),
    "p4de": preset("p4de", 4),
    "h200": preset("h200", 4),
}
SLOW = ("one_link", "pcie", "ethernet")
# Means and deviations of the logarithm of lengths, and its least and greatest where it is uniform.
LOGNORMAL = {"mixed": (8.2, 1.2), "short": (6.8, 0.9)}
UNIFORM = {"long": (4096, 65536)}
LISTS = ("ldc", "longalign", *LOGNORMAL, *UNIFORM)


def draw_lengths(name: str, seed: int) -> list[int]:
    """Lengths by name of a sampler, or drawn from a distribution of this file."""
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


def run_case(network: str, name: str, mask: str, seed: int) -> tuple[float, bool]:
    """Best static method over ours, and whether ours is dynamic."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", default=",".join(SLOW))
    parser.add_argument("--lists", default=",".join(LISTS))
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--seeds", default="0")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    run_case("p4de", "ldc", "causal", 0)  # compiles
    print("network   lengths    mask       seed    ideal     ours", end=" ")
    print(f"{'choice':26} {'static':>8} {'method':26} {'ratio':>6} planning")
    for network in options.networks.split(","):
        results = [
            run_case(network, name, mask, seed)
            for name in options.lists.split(",")
            for mask in options.masks.split(",")
            for seed in seeds
        ]
        ratios, dynamic = zip(*results, strict=True)
        print(
            f"{network}: ratio {geometric_mean(ratios):.2f} in the geometric mean, "
            f"{min(ratios):.2f} at least; dynamic in {sum(dynamic)} of {len(dynamic)}"
        )


if __name__ == "__main__":
    main()
