"""Compares predicted and measured time of plans on real processes over slow links. Needs root.

    sudo python -m benchmarks.network [--cases 2:ldc_x0.5:causal:0,...] [--seconds 2.5]

Network namespaces act as nodes, and token buckets limit the rate of their links (see
network_links.py). Every rank is a process that runs the executor over gloo (see network_ranks.py);
instead of computing it waits for as long as the cost model says, so that two cores suffice for
eight ranks. Links are measured first. A case is nodes:lengths:mask:seed[:tokens], with two ranks
per node and 8,192 tokens by default. Prints predicted and measured milliseconds of one attention
layer, forward and backward (the fastest of several runs for each direction); then the errors, the
pairs of plans whose order was predicted correctly, and whether `auto` is fastest. If namespaces
cannot be created, it says why and exits without an error.
"""

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path

import numpy as np

from benchmarks.cases import SHAPE, Case
from benchmarks.network_links import Namespaces, NotAllowedError, Rates
from benchmarks.network_ranks import Ranks
from dyncp import PlannerConfig
from dyncp.blocks import DEFAULT_MASK, Direction
from dyncp.cost import CostModel, Profile
from dyncp.placement import Limits, find_solver, static_candidates
from dyncp.plan import Layout, Op, Plan
from dyncp.plan.codec import encode_part
from dyncp.planner import Candidate, Placed, Task, choose
from dyncp.planner.search import search_divisions
from dyncp.simulate import AttentionTimes, simulate_plan
from dyncp.topology import Link, Topology

CASES = (
    "2:ldc_x0.5:causal:0",
    "2:ldc_x0.25:lambda:1",
    "2:single:causal:0",
    "4:ldc_x0.5:causal:1",
    "4:ldc_x0.25:shared:0:16384",
    "4:single:causal:0",
)
RANKS_PER_MACHINE = 2
TOKENS = 8192
RATES = Rates(inside=400, between=100)
# FLOP/s of attention with 8 heads, chosen so that computation takes about as long as messages.
FLOPS = 100e9
LEAST, MOST = 2, 8  # timed runs of a plan
PAYLOAD = 1448 / 1514  # share of the rate that is payload, not headers
# Bytes of the messages that links are measured with, and the number of repeats.
LARGE = (512 << 10, 2 << 20)
SENT = 8
AUTO = "auto"
# Static plans predicted to take more than this many times the fastest are left out.
MUCH_SLOWER = 2.0
# The order of two plans is not judged if their measured times differ by less than this share.
APART = 0.03
# `auto` may take this many times as long as the fastest plan measured.
AS_FAST = 1.02


@dataclass(frozen=True, eq=False)
class Predicted:
    """A plan and its simulated calls, forward and backward. The plan of `auto` may be static."""

    name: str
    static: bool
    plan: Plan
    times: tuple[AttentionTimes, AttentionTimes]

    @property
    def seconds(self) -> float:
        return sum(times.seconds for times in self.times)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Predicted and measured seconds of one plan of a batch."""

    batch: str
    name: str
    static: bool
    auto: bool
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error; 0.05 if the plan took 5 % longer than predicted."""
        return self.measured / self.predicted - 1


def measure_links(ranks: Ranks, nodes: int) -> Topology:
    """The links with their configured rates and the measured latency of small messages."""
    num_ranks = nodes * RANKS_PER_MACHINE
    inside, between = (
        _make_link(ranks, num_ranks, name, target, getattr(RATES, name))
        for name, target in (("inside", 1), ("between", num_ranks - 1))
    )
    return Topology(
        nodes, RANKS_PER_MACHINE, inside, between, nics=1, ordered_phases=False, name="shaped"
    )


def _make_link(ranks: Ranks, num_ranks: int, name: str, target: int, rate: int) -> Link:
    """A link with the configured rate and the latency of rank 0's fastest message; prints the
    measured rate, too."""

    def seconds(size: int) -> float:
        command = {"do": "send", "messages": [(0, target, size)], "repeats": SENT}
        return min(map(max, zip(*ranks.ask([command] * num_ranks), strict=True)))

    link = Link(seconds(1), PAYLOAD * rate * 1e6 / 8)
    measured = (LARGE[1] - LARGE[0]) / (seconds(LARGE[1]) - seconds(LARGE[0]))
    print(
        f"{name} nodes: {link.bandwidth / 1e6:.2f} MB/s ({measured / 1e6:.2f} measured), "
        f"{1e3 * link.latency:.1f} ms",
        flush=True,
    )
    return link


def run_plan(
    ranks: Ranks, predicted: Predicted, seconds: float, folder: Path
) -> tuple[float, float]:
    """Seconds of the fastest forward and the fastest backward; the first run is not timed."""
    repeats = min(max(round(seconds / predicted.seconds), LEAST), MOST)
    commands = []
    for rank, part in enumerate(predicted.plan.parts):
        path = folder / str(rank)
        path.write_bytes(encode_part(part))
        waits = call_seconds(predicted, rank)
        commands.append({"do": "run", "part": str(path), "seconds": waits, "repeats": 1 + repeats})
    answers = ranks.ask(commands)
    forward, backward = (
        min(max(answer[run][side] for answer in answers) for run in range(1, 1 + repeats))
        for side in (0, 1)
    )
    return forward, backward


def run_case(
    ranks: Ranks, case: Case, topology: Topology, profile: Profile, seconds: float
) -> Iterator[Outcome]:
    batch = f"{topology.nodes} × {topology.ranks_per_node} {case}"
    print(f"{batch}: planning ...", flush=True)
    plans = make_plans(case, topology, profile)
    with tempfile.TemporaryDirectory() as folder:
        for one in plans:
            measured = run_plan(ranks, one, seconds, Path(folder))
            outcome = Outcome(
                batch,
                one.name,
                one.static,
                one.name.startswith(AUTO + " "),
                one.seconds,
                sum(measured),
            )
            print(
                f"{batch:28} {one.name:34} {_text(one, measured)} {outcome.error:+7.1%}", flush=True
            )
            yield outcome


def _text(predicted: Predicted, measured: tuple[float, float]) -> str:
    """Predicted and measured milliseconds, forward and backward."""
    pairs = zip(predicted.times, measured, strict=True)
    return "  ".join(f"{1e3 * times.seconds:6.1f} {1e3 * found:6.1f}" for times, found in pairs)


def run_network(nodes: int, cases: Sequence[Case], seconds: float) -> Iterator[Outcome]:
    """Runs all cases for this number of nodes."""
    with Namespaces(nodes, RANKS_PER_MACHINE, RATES) as net, Ranks(net) as ranks:
        topology = measure_links(ranks, nodes)
        profile = make_profile(topology, FLOPS)
        for case in cases:
            yield from run_case(ranks, case, topology, profile, seconds)


def parse_case(text: str) -> tuple[int, Case]:
    parts = text.split(":")
    if len(parts) not in (4, 5):
        raise ValueError(
            f"case is {text!r}; write nodes:lengths:mask:seed or nodes:lengths:mask:seed:tokens"
        )
    nodes, sample, mask, seed, *tokens = parts
    return int(nodes), Case(sample, mask, int(seed), int(tokens[0]) if tokens else TOKENS)


def make_profile(topology: Topology, flops: float) -> Profile:
    """A profile that computes `flops` per second in both directions; row work is free."""
    return Profile(
        name=topology.name,
        attention_forward=flops,
        attention_backward=flops,
        dense=flops,
        copy=1e18,
        call_seconds=0.0,
        kernel_tile=32,
        ranks_per_node=topology.ranks_per_node,
        intra=topology.intra,
        inter=topology.inter,
        nics=topology.nics,
        ordered_phases=topology.ordered_phases,
    )


def make_plans(case: Case, topology: Topology, profile: Profile) -> list[Predicted]:
    """One plan per method, `auto` first; methods with the same plan share an entry."""
    cost = CostModel(profile, SHAPE)
    batch = case.batch()

    def task(**options: object) -> Task:
        return Task.of(batch, topology, SHAPE, PlannerConfig(**options), cost)  # type: ignore[arg-type]

    found: dict[str, Predicted] = {}
    for name, candidate in _candidates(task):
        plan = candidate.assemble(Layout())
        if plan.digest not in found:
            static = candidate.placement.static
            found[plan.digest] = _predict(name, static, plan, topology, cost)
    fastest = min(one.seconds for one in found.values())
    return [p for p in found.values() if not p.static or p.seconds < MUCH_SLOWER * fastest]


def _candidates(task: Callable[..., Task]) -> Iterator[tuple[str, Candidate]]:
    plain = task()
    chosen = choose(plain).candidate
    yield f"{AUTO} ({chosen.placement.solver})", chosen
    yield "auto, quality", choose(task(effort="quality")).candidate
    for name in ("owner_computes", "bisection", "bisection_quality"):
        placed = plain.place(find_solver(name), Limits(0.1, 0.2))
        yield from _dynamic(plain, name, placed)
    statics = static_candidates(plain.batch.lengths, plain.shape, plain.topology)
    scheduled = [plain.follow(plain.place(solver)) for solver in statics]
    best = min(scheduled, key=lambda one: plain.simulate(one).step_seconds)
    yield from _dynamic(plain, best.placement.solver, best.placed)
    for candidate in scheduled:
        yield candidate.placement.solver, candidate


def _dynamic(task: Task, name: str, placed: Placed) -> Iterator[tuple[str, Candidate]]:
    """A placement, and the same placement improved by moves."""
    if not placed.placement.static:
        yield name, search_divisions(task, placed).candidate
    improved = task.improve(placed)
    if improved is not None:
        yield f"improved from {name}", search_divisions(task, improved).candidate


def _predict(name: str, static: bool, plan: Plan, topology: Topology, cost: CostModel) -> Predicted:
    forward, backward = simulate_plan(plan, topology, cost).attention[DEFAULT_MASK]
    assert backward is not None
    return Predicted(name, static, plan, (forward, backward))


def call_seconds(predicted: Predicted, rank: int) -> tuple[list[float], list[float]]:
    """Seconds of every kernel call of a rank in program order, forward and backward; the head
    groups of a division get equal shares."""
    mask = predicted.plan.parts[rank].mask_plan(DEFAULT_MASK)
    found: tuple[list[float], list[float]] = ([], [])
    for direction in Direction:
        flow, division_of = predicted.times[direction].flow, mask.program(direction).tile_division
        own = slice(*flow.programs.first[rank : rank + 2])
        for op, division, seconds in zip(
            flow.programs.op[own], flow.programs.argument[own], flow.work[own], strict=True
        ):
            if op == Op.COMPUTE:
                calls = len(np.unique(mask.tiles.head_group[division_of == division]))
                found[direction].extend([float(seconds) / calls] * calls)
    return found


@dataclass(frozen=True, slots=True)
class Pairs:
    """The number of pairs of plans of one batch, and in how many the predicted winner won."""

    count: int
    right: int

    def __str__(self) -> str:
        share = f" ({self.right / self.count:.1%})" if self.count else ""
        return f"{self.right} of {self.count}{share}"


def count_pairs(outcomes: Sequence[Outcome], apart: float = 0.0) -> Pairs:
    """Counts pairs whose slower plan took more than 1 + `apart` times as long as the faster one."""
    results = [
        (one.predicted < other.predicted) == (one.measured < other.measured)
        for own in by_batch(outcomes)
        for one, other in combinations(own, 2)
        if max(one.measured, other.measured) > (1 + apart) * min(one.measured, other.measured)
    ]
    return Pairs(len(results), sum(results))


def by_batch(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    names = dict.fromkeys(outcome.batch for outcome in outcomes)
    return [[outcome for outcome in outcomes if outcome.batch == name] for name in names]


def summarize(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The summary as lines of text."""
    kinds = {
        "all": outcomes,
        "dynamic": [one for one in outcomes if not one.static],
        "static": [one for one in outcomes if one.static],
    }
    for name, own in kinds.items():
        if own:
            yield f"{name:8} {_errors(own)}"
    if kinds["dynamic"] and kinds["static"]:
        apart = _bias(kinds["dynamic"]) - _bias(kinds["static"])
        yield f"dynamic plans took {apart:+.1%} longer than static ones, by what was predicted"
    yield f"predicted winner won in {count_pairs(outcomes)} pairs"
    yield f"                     in {count_pairs(outcomes, APART)} that differ by more than 3 %"
    for own in by_batch(outcomes):
        yield _standing(own)


def _bias(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(one.error for one in outcomes)


def _errors(outcomes: Sequence[Outcome]) -> str:
    size = [abs(one.error) for one in outcomes]
    worst = max(outcomes, key=lambda one: abs(one.error))
    return (
        f"{len(outcomes):4} plans: measured {_bias(outcomes):+.1%} in the median, error "
        f"{statistics.median(size):.1%} in the median, {max(size):.1%} at worst "
        f"({worst.name}, {worst.batch})"
    )


def _standing(outcomes: Sequence[Outcome]) -> str:
    """How `auto` ranks among the plans of a batch."""
    auto = next(one for one in outcomes if one.auto)
    static = min((one for one in outcomes if one.static), key=lambda one: one.measured)
    fastest = min(outcomes, key=lambda one: one.measured)
    ratio = auto.measured / fastest.measured
    place = "fastest" if fastest is auto else f"{ratio:.3f} × the fastest ({fastest.name})"
    verdict = "" if ratio <= AS_FAST else ", TOO SLOW"
    gain, predicted = (
        getattr(static, what) / getattr(auto, what) for what in ("measured", "predicted")
    )
    return (
        f"{auto.batch}: {auto.name} is {place}{verdict}; best static {static.name}: "
        f"{gain:.2f} × its time measured, {predicted:.2f} predicted"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=2.5, help="seconds of all runs of a plan")
    options = parser.parse_args()
    cases = [parse_case(text) for text in options.cases.split(",")]
    outcomes: list[Outcome] = []
    try:
        for nodes, own in groupby(cases, key=lambda case: case[0]):
            batches = [case for _, case in own]
            outcomes += run_network(nodes, batches, options.seconds)
    except NotAllowedError as reason:
        print(f"skipped: network namespaces with shaped links cannot be made here ({reason})")
        return
    print(*summarize(outcomes), sep="\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # removes namespaces
    main()
