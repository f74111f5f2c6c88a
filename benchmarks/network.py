"""Predicted and measured time of plans on real processes over real, slow links. Needs root.

    sudo python -m benchmarks.network [--cases 2:ldc_x0.5:causal:0,...] [--seconds 2.5]

Network namespaces stand for machines, and token buckets limit the rate of their links (see
network_links.py). Every rank is a process that runs the executor over gloo; computing is replaced
by waiting for as long as the cost model says, so that two cores suffice for eight ranks. Links are
measured first. A case is machines:lengths:mask:seed, with two ranks per machine and 8,192 tokens,
or with :tokens besides. Printed are milliseconds of one attention layer, predicted and measured,
forward and backward, the fastest of some runs for each direction. Where namespaces cannot be made
it says why and ends without an error.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.network_links import Namespaces, NotAllowedError, Rates
from benchmarks.network_plans import AUTO, Predicted, call_seconds, make_plans, make_profile
from benchmarks.network_ranks import Ranks
from benchmarks.network_report import Outcome, summarize
from dyncp.cost import Profile
from dyncp.plan.codec import encode_part
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
# Computation takes about as long as messages: attention of 8 heads in FLOP/s.
FLOPS = 100e9
LEAST, MOST = 2, 8  # runs of a plan that count
PAYLOAD = 1448 / 1514  # share of the rate that is no headers
# Messages that links are measured with, in bytes, and how often.
LARGE = (512 << 10, 2 << 20)
SENT = 8


def measure_links(ranks: Ranks, machines: int) -> Topology:
    """Links as they are shaped, with the latency of small messages."""
    num_ranks = machines * RANKS_PER_MACHINE
    inside, between = (
        _make_link(ranks, num_ranks, name, target, getattr(RATES, name))
        for name, target in (("inside", 1), ("between", num_ranks - 1))
    )
    return Topology(
        machines, RANKS_PER_MACHINE, inside, between, nics=1, ordered_phases=False, name="shaped"
    )


def _make_link(ranks: Ranks, num_ranks: int, name: str, target: int, rate: int) -> Link:
    """From what messages of rank 0 take, at best."""

    def seconds(size: int) -> float:
        command = {"do": "send", "messages": [(0, target, size)], "repeats": SENT}
        return min(map(max, zip(*ranks.ask([command] * num_ranks), strict=True)))

    link = Link(seconds(1), PAYLOAD * rate * 1e6 / 8)
    measured = (LARGE[1] - LARGE[0]) / (seconds(LARGE[1]) - seconds(LARGE[0]))
    print(
        f"{name} machines: {link.bandwidth / 1e6:.2f} MB/s ({measured / 1e6:.2f} measured), "
        f"{1e3 * link.latency:.1f} ms",
        flush=True,
    )
    return link


def run_plan(
    ranks: Ranks, predicted: Predicted, seconds: float, folder: Path
) -> tuple[float, float]:
    """The fastest forward and the fastest backward. The first run does not count."""
    repeats = min(max(round(seconds / predicted.seconds), LEAST), MOST)
    commands = []
    for rank, part in enumerate(predicted.plan.parts):
        path = folder / str(rank)
        path.write_bytes(encode_part(part))
        waits = call_seconds(predicted, rank)
        commands.append({"do": "run", "part": str(path), "seconds": waits, "repeats": 1 + repeats})
    answers = ranks.ask(commands)
    forward, backward = (
        min(
            max(answer[run][side]["seconds"] for answer in answers) for run in range(1, 1 + repeats)
        )
        for side in (0, 1)
    )
    return forward, backward


def run_case(
    ranks: Ranks, case: Case, topology: Topology, profile: Profile, seconds: float
) -> Iterator[Outcome]:
    batch = f"{topology.machines} × {topology.ranks_per_machine} {case}"
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


def run_network(machines: int, cases: Sequence[Case], seconds: float) -> Iterator[Outcome]:
    """All cases on this many machines."""
    with Namespaces(machines, RANKS_PER_MACHINE, RATES) as net, Ranks(net) as ranks:
        topology = measure_links(ranks, machines)
        profile = make_profile(topology, FLOPS)
        for case in cases:
            yield from run_case(ranks, case, topology, profile, seconds)


def parse_case(text: str) -> tuple[int, Case]:
    parts = text.split(":")
    if len(parts) not in (4, 5):
        raise ValueError(f"case is {text!r}; write machines:lengths:mask:seed, or :tokens besides")
    machines, sample, mask, seed, *tokens = parts
    return int(machines), Case(sample, mask, int(seed), int(tokens[0]) if tokens else TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=2.5, help="of runs of a plan")
    options = parser.parse_args()
    cases = [parse_case(text) for text in options.cases.split(",")]
    outcomes: list[Outcome] = []
    try:
        for machines, own in groupby(cases, key=lambda case: case[0]):
            batches = [case for _, case in own]
            outcomes += run_network(machines, batches, options.seconds)
    except NotAllowedError as reason:
        print(f"skipped: network namespaces with shaped links cannot be made here ({reason})")
        return
    print(*summarize(outcomes), sep="\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # removes namespaces
    main()
