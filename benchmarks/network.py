"""Predicted and measured time of plans on real processes over real, slow links. Needs root.

    sudo python -m benchmarks.network [--cases 2:ldc_x0.5:causal:0,...] [--repeats 3]

Network namespaces stand for machines, and token buckets limit the rate of their links (see
network_links.py). Every rank is a process that runs the executor over gloo; computing is replaced
by waiting for as long as the cost model says, so that two cores suffice for eight ranks. Links are
measured first. A case is machines:lengths:mask:seed, with 2 or 4 machines of two ranks. Printed are
milliseconds of one attention layer, predicted and measured, forward and backward, the fastest of
some runs for each direction. Where namespaces cannot be made it says why and ends without an error.
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
    "2:ldc_x0.1:causal:2",
    "2:ldc_x0.25:lambda:1",
    "2:single:causal:0",
    "4:ldc_x0.5:causal:1",
    "4:ldc_x0.25:shared:0",
    "4:single:causal:0",
)
RANKS_PER_MACHINE = 2
TOKENS = {2: 8192, 4: 12_288}  # of a batch, by machines
RATES = Rates(inside=400, between=100)
# Computation takes about as long as messages: attention of 8 heads in FLOP/s.
FLOPS = 100e9
SIZES = (1 << 10, 512 << 10, 2 << 20)  # of messages that links are measured with
SENT = 8  # times each


def measure_links(ranks: Ranks, machines: int) -> Topology:
    """What messages take while all ranks send to their neighbours on the machine, and to their
    counterparts on the next one."""
    inside, between = (
        _measure_link(ranks, num_ranks=machines * RANKS_PER_MACHINE, distance=distance)
        for distance in (1, RANKS_PER_MACHINE)
    )
    whole = Link(between.latency, between.bandwidth * RANKS_PER_MACHINE)
    return Topology(
        machines, RANKS_PER_MACHINE, inside, whole, nics=1, ordered_phases=False, name="shaped"
    )


def _measure_link(ranks: Ranks, num_ranks: int, distance: int) -> Link:
    """Latency of small messages, and the bandwidth that large ones of two sizes differ by."""
    small, large, larger = (_send(ranks, num_ranks, distance, size) for size in SIZES)
    return Link(small, (SIZES[2] - SIZES[1]) / (larger - large))


def _send(ranks: Ranks, num_ranks: int, distance: int, size: int) -> float:
    """Seconds until all have a message of this size, at best."""

    def target(rank: int) -> int:
        inside = distance < RANKS_PER_MACHINE
        return rank ^ 1 if inside else (rank + distance) % num_ranks

    messages = [(rank, target(rank), size) for rank in range(num_ranks)]
    command = {"do": "send", "messages": messages, "repeats": SENT}
    answers = ranks.ask([command] * num_ranks)
    return min(map(max, zip(*answers, strict=True)))


def run_plan(ranks: Ranks, predicted: Predicted, repeats: int, folder: Path) -> tuple[float, float]:
    """The fastest forward and the fastest backward, seconds. The first run does not count."""
    commands = []
    for rank, part in enumerate(predicted.plan.parts):
        path = folder / str(rank)
        path.write_bytes(encode_part(part))
        seconds = call_seconds(predicted, rank)
        commands.append(
            {"do": "run", "part": str(path), "seconds": seconds, "repeats": 1 + repeats}
        )
    answers = ranks.ask(commands)
    forward, backward = (
        min(
            max(answer[run][side]["seconds"] for answer in answers) for run in range(1, 1 + repeats)
        )
        for side in (0, 1)
    )
    return forward, backward


def run_case(
    ranks: Ranks, case: Case, topology: Topology, profile: Profile, repeats: int
) -> Iterator[Outcome]:
    batch = f"{topology.machines} × {topology.ranks_per_machine} {case}"
    print(f"{batch}: planning ...", flush=True)
    plans = make_plans(case, topology, profile)
    with tempfile.TemporaryDirectory() as folder:
        for one in plans:
            measured = run_plan(ranks, one, repeats, Path(folder))
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


def run_network(machines: int, cases: Sequence[Case], repeats: int) -> Iterator[Outcome]:
    """All cases on this many machines."""
    with Namespaces(machines, RANKS_PER_MACHINE, RATES) as net, Ranks(net) as ranks:
        topology = measure_links(ranks, machines)
        for name, link in (("inside", topology.intra), ("between", topology.inter)):
            print(
                f"{machines} × {RANKS_PER_MACHINE}, {name} machines: {link.bandwidth / 1e6:.1f} "
                f"MB/s, {1e3 * link.latency:.2f} ms; shaped to {getattr(RATES, name) / 8:.1f} MB/s"
            )
        profile = make_profile(topology, FLOPS)
        for case in cases:
            yield from run_case(ranks, case, topology, profile, repeats)


def parse_case(text: str) -> tuple[int, Case]:
    parts = text.split(":")
    if len(parts) != 4:
        raise ValueError(f"case is {text!r}; write machines:lengths:mask:seed")
    machines, sample, mask, seed = parts
    if int(machines) not in TOKENS:
        raise ValueError(f"case is {text!r}; machines may be {' or '.join(map(str, TOKENS))}")
    return int(machines), Case(sample, mask, int(seed), TOKENS[int(machines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cases = [parse_case(text) for text in options.cases.split(",")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # removes namespaces
    outcomes: list[Outcome] = []
    try:
        for machines, own in groupby(cases, key=lambda case: case[0]):
            batches = [case for _, case in own]
            outcomes += run_network(machines, batches, options.repeats)
    except NotAllowedError as reason:
        print(f"skipped: network namespaces with shaped links cannot be made here ({reason})")
        return
    print(*summarize(outcomes), sep="\n")


if __name__ == "__main__":
    main()
