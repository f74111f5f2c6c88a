"""Measures how full batches are and how balanced replicas are, filling batches in order (window 1)
or from a window of samples.

    python -m benchmarks.fill                                all tables
    python -m benchmarks.fill --sample ldc --tokens 131072 --window 4
    python -m benchmarks.fill --too-long split

An epoch has samples for 2,048 batches; samples longer than a batch are cut to its budget. `fill` is
the share of the budget that batches use, `whole epoch` the fill by best fit over all samples,
longest first, and `at most` an upper bound for any method.

Rounds of N replicas: tokens, attention pairs and predicted seconds of the busiest replica over the
mean, summed over rounds; `idle` is the share of time that replicas wait for the busiest. Seconds
are for Llama-3-8B with causal attention on A100s.
"""

import argparse
from bisect import bisect_left, insort
from collections.abc import Iterator
from time import perf_counter

import numpy as np

from dyncp import masks
from dyncp.cost import CostModel, find_model, find_profile, sample_seconds
from dyncp.dataloader.batching import BatchSelector
from dyncp.dataloader.options import LoaderConfig, LoaderTuning
from dyncp.dataloader.state import Position
from dyncp.samplers import find_distribution
from dyncp.samples.source import SampleEntry, open_source

BATCHES = 2048
TOKENS = (32_768, 65_536, 131_072)
REPLICAS = (1, 2, 4, 8, 16, 32, 64)
SAMPLES = ("lognormal", "heavy_tailed", "ldc", "longalign")
MODEL = find_model("llama3_8b")
SECONDS = sample_seconds(
    masks.causal,
    CostModel(find_profile("p4de"), MODEL.attention_shape()),
    MODEL,
    forward_only=False,
)
Round = list[tuple[SampleEntry, ...]]


def lengths_of(name: str, tokens: int, seed: int) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    if name == "lognormal":  # a median of 1,500 tokens
        while True:
            yield max(1, round(rng.lognormal(np.log(1500), 1.0)))
    if name == "heavy_tailed":  # Pareto: one in 20,000 samples has more than 2M tokens
        while True:
            yield round(256 * (1 + rng.pareto(1.1)))
    while True:
        yield find_distribution(name)(rng, tokens)


def epoch_lengths(name: str, tokens: int, seed: int) -> list[int]:
    """Lengths of enough samples to fill the batches of an epoch, cut to the budget."""
    total, lengths = 0, []
    for length in lengths_of(name, tokens, seed):
        lengths.append(length)
        total += min(length, tokens)
        if total >= BATCHES * tokens:
            return lengths
    raise AssertionError("the distribution ended")


def rounds(
    lengths: list[int], tokens: int, replicas: int, window: int | None, policy: str
) -> list[Round]:
    """The batches of each round, by replica."""
    config = LoaderConfig(
        tokens_per_batch=tokens, lengths=lengths, shuffle=True, too_long=policy,
        tuning=LoaderTuning(window=window),
    )  # fmt: skip
    source = open_source(range(len(lengths)), config.samples)
    selector = BatchSelector(source, config, tokens, 0, replicas, SECONDS)
    return [[batch.entries for batch in batches] for batches, _ in selector.rounds(Position())]


def whole_epoch(lengths: list[int], tokens: int) -> float:
    """The fill by best fit, longest sample first."""
    room: list[int] = []
    bins = 0
    for length in sorted((min(length, tokens) for length in lengths), reverse=True):
        at = bisect_left(room, length)
        left = tokens if at == len(room) else room.pop(at)
        bins += left == tokens
        if left > length:
            insort(room, left - length)
    return sum(min(length, tokens) for length in lengths) / (bins * tokens)


def most_fill(lengths: list[int], tokens: int) -> float:
    """An upper bound on the fill (Martello and Toth's L2). For any a: samples longer than tokens -
    a share a batch with no sample of at least a tokens; samples longer than half a batch need a
    batch each; and other samples of at least a tokens that do not fit into these need further
    batches."""
    sizes = np.sort(np.minimum(lengths, tokens))
    sums = np.append(0, np.cumsum(sizes))
    least = np.unique(sizes[2 * sizes <= tokens])
    halves = np.searchsorted(sizes, tokens / 2, side="right")
    alone = np.searchsorted(sizes, tokens - least, side="right")
    small = sums[halves] - sums[np.searchsorted(sizes, least)]
    room = (alone - halves) * tokens - (sums[alone] - sums[halves])
    further = np.maximum(0, np.ceil((small - room) / tokens))
    batches = max(np.ceil(sums[-1] / tokens), (len(sizes) - halves + further).max(initial=0))
    return float(sums[-1] / (batches * tokens))


def fill_of(found: list[Round], tokens: int) -> float:
    batches = [batch for round_ in found for batch in round_]
    return sum(e.length for batch in batches for e in batch) / (len(batches) * tokens)


def busiest(found: list[Round], replicas: int) -> tuple[float, ...]:
    """Tokens, pairs and seconds of the busiest replica over the mean, summed over all full
    rounds."""
    ratios = []
    for weigh in (float, lambda n: n * (n + 1) / 2, SECONDS):
        loads = np.array(
            [
                [sum(weigh(e.length) for e in batch) for batch in round_]
                for round_ in found
                if len(round_) == replicas
            ]
        )
        ratios.append(float(loads.max(axis=1).sum() / loads.mean(axis=1).sum()))
    return tuple(ratios)


def table(name: str, tokens: int, args: argparse.Namespace) -> None:
    lengths = epoch_lengths(name, tokens, args.seed)
    print(f"\n{name}, {tokens:,} tokens: {len(lengths):,} samples, mean {np.mean(lengths):,.0f}")
    start = perf_counter()
    plain = rounds(lengths, tokens, 1, 1, args.too_long)
    middle = perf_counter()
    filled = rounds(lengths, tokens, 1, args.window, args.too_long)
    end = perf_counter()
    print(f"  {'':12}{'window 1':>10}{'window ' + str(args.window or ''):>11}")
    print(f"  {'fill':12}{fill_of(plain, tokens):10.4f}{fill_of(filled, tokens):11.4f}", end="")
    whole, most = whole_epoch(lengths, tokens), most_fill(lengths, tokens)
    print(f"   whole epoch {whole:.4f}, at most {most:.4f}" * (args.too_long == "truncate"))
    print(f"  {'batches':12}{len(plain):10,}{len(filled):11,}")
    scale = 1e6 / len(lengths)
    print(f"  {'µs/sample':12}{scale * (middle - start):10.1f}{scale * (end - middle):11.1f}")
    print(f"  busiest replica over the mean{'tokens':>14}{'pairs':>14}{'seconds':>14}{'idle':>15}")
    for replicas in args.replicas:
        before = busiest(rounds(lengths, tokens, replicas, 1, args.too_long), replicas)
        after = busiest(rounds(lengths, tokens, replicas, args.window, args.too_long), replicas)
        pairs = "".join(f"{b:8.3f}{a:6.3f}" for b, a in zip(before, after, strict=True))
        idle = f"{100 * (1 - 1 / before[2]):8.1f}{100 * (1 - 1 / after[2]):5.1f} %"
        print(f"  {replicas:>8} replicas            {pairs}{idle}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", nargs="*", default=SAMPLES)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--replicas", nargs="*", type=int, default=REPLICAS)
    parser.add_argument("--window", type=int, help="default: the loader's")
    parser.add_argument("--too-long", default="truncate")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in args.sample:
        for tokens in args.tokens:
            table(name, tokens, args)


if __name__ == "__main__":
    main()
