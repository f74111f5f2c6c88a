"""`dyncp simulate`: many batches under every method, side by side, and a verdict."""

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dyncp.blocks import Batch
from dyncp.checks import whole_number
from dyncp.cli import arguments
from dyncp.cli.arguments import Progress, option
from dyncp.cli.plan import describe_traffic
from dyncp.cost import CostModel, ModelConfig
from dyncp.placement import STATIC_SOLVERS, static_candidates
from dyncp.planner import AUTO, Candidate, PlannerConfig, Task, choose
from dyncp.samplers import parse_sample, read_lengths, sample_lengths
from dyncp.simulate import simulate_schedules
from dyncp.topology import Topology

STATIC_METHODS = tuple(solver.name for solver in STATIC_SOLVERS)
OURS = "dyncp"
# Steps that differ by less count as equally fast: as much depends on where blocks happen to end.
TIE = 0.005
# Below this difference of the mean step a simulation decides nothing.
MARGIN = 0.02
PARTS = {
    "kernel_seconds": "attention kernels",
    "token_seconds": "per-token work",
    "exposed_seconds": "exposed communication and waiting",
}
MOST_SPLITS = 3
SUMMARY = "simulate many batches under dyncp and every static method, and say what to use"
EXAMPLES = (
    "dyncp simulate --sample ldc:0 --model llama3-8b",
    "dyncp simulate --lengths-file lengths.txt --tokens 65536 --topology h200 --nodes 2",
    "dyncp simulate --sample longalign:0 --mask lambda_shaped --bandwidth 0.25 --batches 4",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What batches are planned for (`planned`) and run on (`topology`, whose ranks may jitter)."""

    planned: Topology
    topology: Topology
    cost: CostModel
    model: ModelConfig | None
    config: PlannerConfig
    methods: tuple[str, ...] = STATIC_METHODS


@dataclass(frozen=True, slots=True)
class Lengths:
    """The sequence lengths of every batch, and a text that says where they come from."""

    batches: tuple[tuple[int, ...], ...]
    origin: str

    @property
    def text(self) -> str:
        sizes = [sum(lengths) for lengths in self.batches]
        low, high = min(sizes), max(sizes)
        tokens = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        count = f"{len(sizes)} batch{'es' if len(sizes) > 1 else ''}"
        return f"{count} of {tokens} tokens ({self.origin})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One batch under one method. A step is `kernel_seconds` + `exposed_seconds` (all attention
    layers) + `token_seconds`, each of the rank that has most."""

    solver: str
    static: bool
    kernel_seconds: float
    exposed_seconds: float
    token_seconds: float
    ideal_seconds: float
    forward_bytes: int
    inter_node_bytes: int
    compute_max_over_mean: float
    tokens_max_over_mean: float
    workspace_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        return self.kernel_seconds + self.exposed_seconds + self.token_seconds


Batches = Sequence[Mapping[str, Outcome]]


def add_options(parser: ArgumentParser) -> None:
    arguments.add_lengths_options(parser, listed=False)
    batches = "how many: of a sample with seeds SEED, SEED+1, ..., of a file the first ones"
    tokens = "of a batch; documents of a file are packed in order into batches of at most this many"
    option(parser, "--batches", batches, 8)
    option(parser, "--tokens", tokens, 131072)
    arguments.add_cluster_options(parser)
    for name in ("bandwidth", "latency"):
        option(parser, f"--{name}", f"all links have this many times the {name}", 1.0)
    option(parser, "--jitter", "ranks are up to this share slower, at random", 0.0)
    arguments.add_attention_options(parser)
    arguments.add_solver_options(parser)
    methods = f"static methods to compare with (default all: {', '.join(STATIC_METHODS)})"
    option(parser, "--methods", methods)
    arguments.add_limit_options(parser)
    option(parser, "--seed", "of the solver and of --jitter", 0)
    arguments.add_json_option(parser)


def run(args: Namespace) -> int:
    setting, lengths = _setting(args), find_lengths(args)
    progress, count = Progress(), len(lengths.batches)
    outcomes = []
    for number, batch_lengths in enumerate(lengths.batches, start=1):
        batch = arguments.make_batch(args, batch_lengths)
        progress.show(f"batch {number} of {count} ...")

        def tell(name: str, number: int = number) -> None:
            if progress.in_place:
                progress.show(f"batch {number} of {count}: {name} ...")

        outcomes.append(run_batch(batch, setting, tell))
    progress.clear()
    summary = summarise(outcomes)
    summary["verdict"] = verdict(summary, args.solver)
    if args.json:
        print(json.dumps(summary | {"batches": _per_batch(lengths, outcomes)}))
    else:
        print(_text(args, setting, lengths, summary))
    return 0


def _setting(args: Namespace) -> Setting:
    config = replace(arguments.config_of(args), seed=args.seed)
    planned, methods = _topology(args), _methods(args.methods)
    topology = planned.jittered(args.jitter, args.seed) if args.jitter else planned
    cost, model = arguments.cost_of(args), arguments.model_of(args)
    return Setting(planned, topology, cost, model, config, methods)


def _topology(args: Namespace) -> Topology:
    if not args.bandwidth > 0:
        raise ValueError(f"--bandwidth is {args.bandwidth}; it must be positive")
    if not args.latency >= 0:
        raise ValueError(f"--latency is {args.latency}; it must not be negative")
    topology = arguments.topology_of(args).scaled(args.bandwidth, args.latency)
    if not 0 <= args.jitter < 1:
        raise ValueError(f"--jitter is {args.jitter}; it must be at least 0 and below 1")
    return topology


def _methods(text: str | None) -> tuple[str, ...]:
    if text is None:
        return STATIC_METHODS
    names = arguments.comma_separated(text) or (text,)
    for name in names:
        if name not in STATIC_METHODS:
            raise ValueError(
                f"--methods names {name!r}; choose from {', '.join(STATIC_METHODS)}, separated by "
                "commas"
            )
    return names


def _per_batch(lengths: Lengths, outcomes: list[dict[str, Outcome]]) -> list[dict[str, Any]]:
    return [
        {
            "lengths": batch_lengths,
            "methods": {
                name: asdict(outcome) | {"step_seconds": outcome.step_seconds}
                for name, outcome in methods.items()
            },
        }
        for batch_lengths, methods in zip(lengths.batches, outcomes, strict=True)
    ]


def _text(args: Namespace, setting: Setting, lengths: Lengths, summary: dict[str, Any]) -> str:
    topology = setting.topology
    where = f"{setting.cost.profile.name}, {topology.nodes} × {topology.ranks_per_node} ranks"
    for name, value in (("bandwidth", args.bandwidth), ("latency", args.latency)):
        where += "" if value == 1 else f", {name} × {value:g}"
    where += f", jitter {args.jitter:g}" if args.jitter else ""
    model = f"model {args.model}" if args.model else "attention alone, one layer"
    ideal = 1e3 * summary["ideal_seconds"]
    return "\n".join(
        [
            f"{lengths.text}, mask {args.mask}",
            f"{where}; {model}; solver {args.solver}",
            "",
            *draw_table(summary),
            "",
            f"ideal without communication and imbalance: {ideal:.2f} ms per step; each static "
            "method has the best split of each batch",
            "",
            summary["verdict"],
        ]
    )


def find_lengths(args: Namespace) -> Lengths:
    tokens, count = arguments.check_tokens(args), args.batches
    whole_number("--batches", count, 1)
    if args.sample is not None:
        name, seed = parse_sample(args.sample)
        drawn = [tuple(sample_lengths(name, tokens, seed + i)) for i in range(count)]
        last = f" to {seed + count - 1}" if count > 1 else ""
        return Lengths(tuple(drawn), f"{name}, seed {seed}{last}")
    packed = pack_documents(read_lengths(args.lengths_file), tokens, args.lengths_file)
    origin = f"{args.lengths_file}, {'the first ' if len(packed) > count else 'all '}"
    origin += f"{min(count, len(packed))} of {len(packed)}"
    return Lengths(tuple(map(tuple, packed[:count])), origin)


def pack_documents(lengths: Sequence[int], tokens: int, path: Path) -> list[list[int]]:
    """Batches of at most `tokens` tokens, documents in file order.

    Lengths 5 3 4 4 with 8 tokens give [5, 3] [4, 4]; 5 4 3 4 gives [5] [4, 3] [4].
    """
    batches: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths, start=1):
        if length > tokens:
            raise ValueError(
                f"lengths file {path}: document {number} has {length:,} tokens, a batch at most "
                f"{tokens:,}; raise --tokens, or cut long documents"
            )
        if length > room:
            batches.append([])
            room = tokens
        batches[-1].append(length)
        room -= length
    return batches


def run_batch(batch: Batch, setting: Setting, tell: Callable[[str], None]) -> dict[str, Outcome]:
    """Every method's outcome, ours first. `tell` hears what is being planned."""
    tell(setting.config.solver)
    task = Task.of(
        batch, setting.planned, setting.cost.shape, setting.config, setting.cost, setting.model
    )
    ours = choose(task).candidate
    best = {OURS: (_outcome(ours, setting), ours)}
    for methods, candidate in static_splits(task, setting.methods, tell):
        outcome = _outcome(candidate, setting)
        for method in methods:
            if method not in best or outcome.step_seconds < best[method][0].step_seconds:
                best[method] = (outcome, candidate)
    return {
        method: replace(
            outcome, workspace_bytes=candidate.assemble(setting.config.layout).memory().peak
        )
        for method, (outcome, candidate) in best.items()
    }


def static_splits(
    task: Task, methods: Sequence[str], tell: Callable[[str], None]
) -> Iterator[tuple[Sequence[str], Candidate]]:
    """Every DP × CP split of the static methods, and which of them it is a split of: the first is
    data parallelism alone, which all of them have."""
    if not methods:
        return
    splits = static_candidates(task.batch.lengths, task.shape, task.topology, tuple(methods))
    for index, solver in enumerate(splits):
        tell(solver.name)
        candidate = task.follow(task.place(solver))
        yield methods if index == 0 else [solver.name.partition("/")[0]], candidate


def _outcome(candidate: Candidate, setting: Setting) -> Outcome:
    simulated = simulate_schedules(
        candidate.graph,
        candidate.placement,
        candidate.schedules,
        setting.topology,
        setting.cost,
        model=setting.model,
    )
    exposed = simulated.num_layers * simulated.exposed_seconds
    forward = [schedule for schedule, _ in candidate.schedules.values()]
    moved = describe_traffic(candidate, setting.topology, forward)
    return Outcome(
        solver=candidate.placement.solver,
        static=candidate.placement.static,
        kernel_seconds=simulated.attention_seconds - exposed,
        exposed_seconds=exposed,
        token_seconds=simulated.token_seconds,
        ideal_seconds=simulated.ideal_seconds,
        forward_bytes=moved["bytes"],
        inter_node_bytes=moved["inter_node_bytes"],
        compute_max_over_mean=candidate.balance.compute_max_over_mean,
        tokens_max_over_mean=candidate.balance.tokens_max_over_mean,
    )


def summarise(batches: Batches) -> dict[str, Any]:
    """Numbers of every method (ours first, then the fastest first), wins and the best static."""
    ideal = [min(o.ideal_seconds for o in outcomes.values()) for outcomes in batches]
    methods = {
        name: _method([outcomes[name] for outcomes in batches], ideal) for name in batches[0]
    }
    order = sorted(methods, key=lambda name: (name != OURS, methods[name]["step_seconds"]["mean"]))
    return {
        "num_batches": len(batches),
        "ideal_seconds": _mean(ideal),
        "methods": {name: methods[name] for name in order},
        "best_static": next(name for name in order if name != OURS),
        "wins": _wins(batches),
    }


def _method(outcomes: Sequence[Outcome], ideal: Sequence[float]) -> dict[str, Any]:
    def both(field: str) -> dict[str, float]:
        values = [float(getattr(outcome, field)) for outcome in outcomes]
        return {"mean": _mean(values), "worst": max(values)}

    ratios = [o.step_seconds / least for o, least in zip(outcomes, ideal, strict=True)]
    return {
        "step_seconds": both("step_seconds"),
        "ratio_to_ideal": _mean(ratios),
        "forward_bytes": both("forward_bytes")["mean"],
        "inter_node_bytes": both("inter_node_bytes")["mean"],
        "compute_max_over_mean": both("compute_max_over_mean"),
        "tokens_max_over_mean": both("tokens_max_over_mean"),
        "peak_workspace_bytes": max(outcome.workspace_bytes for outcome in outcomes),
        "parts": {part: both(part)["mean"] for part in PARTS},
        "static_batches": sum(outcome.static for outcome in outcomes),
        "solvers": dict(Counter(outcome.solver for outcome in outcomes).most_common()),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _wins(batches: Batches) -> dict[str, Any]:
    """In how many batches ours is faster than, as fast as and slower than the best static method
    of that batch, and by how much at worst."""
    ratios = []
    for outcomes in batches:
        best = min(o.step_seconds for name, o in outcomes.items() if name != OURS)
        ratios.append(outcomes[OURS].step_seconds / best)
    faster, slower = sum(r < 1 - TIE for r in ratios), sum(r > 1 + TIE for r in ratios)
    equal = len(ratios) - faster - slower
    return {"faster": faster, "equal": equal, "slower": slower, "worst_ratio": max(ratios)}


def verdict(summary: Mapping[str, Any], solver: str) -> str:
    """Use it or not, and why, in words."""
    best, methods = summary["best_static"], summary["methods"]
    ours, static = methods[OURS], methods[best]
    mine, theirs = ours["step_seconds"]["mean"], static["step_seconds"]["mean"]
    given = f"on {_batches(summary['num_batches'])} a step takes {_ms(mine)}"
    if theirs > mine * (1 + MARGIN):
        return (
            f"Use dyncp: {given}, {theirs / mine:.2f}× faster than the best static method "
            f"({best}, {_ms(theirs)}), {_against_each(summary)}. {_gain(ours, static)} "
            f"{_composition(ours)}{_hint(summary, solver)}"
        )
    if theirs * (1 + MARGIN) >= mine:
        reason = f"is within {100 * MARGIN:.0f} %. {_limit(ours)}"
    else:
        reason = f"is {mine / theirs:.2f}× faster. {_gain(static, ours)}"
    return (
        f"Not worth it: {given}, and the best static method ({best}, {_ms(theirs)}) {reason}"
        f"{_hint(summary, solver)}"
    )


def _hint(summary: Mapping[str, Any], solver: str) -> str:
    """What the planner's search would do, or did."""
    taken, count = summary["methods"][OURS]["static_batches"], summary["num_batches"]
    if solver == AUTO and taken:
        return f" The planner itself took a static method in {taken} of {count} batches."
    if solver != AUTO and summary["wins"]["slower"]:
        return " --solver auto takes the best of both in every batch."
    return ""


def _batches(count: int) -> str:
    return f"these {count} batches" if count > 1 else "this batch"


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{0 if milliseconds >= 1000 else 1 if milliseconds >= 10 else 2}f} ms"


def _against_each(summary: Mapping[str, Any]) -> str:
    wins, count = summary["wins"], summary["num_batches"]
    if not wins["slower"]:
        return "and it was never slower than any of them"
    return (
        f"although in {wins['slower']} of {count} batches one of them is faster (at most "
        f"{wins['worst_ratio']:.2f}×)"
    )


def _gain(fast: Mapping[str, Any], slow: Mapping[str, Any]) -> str:
    """Where most of the difference comes from."""
    saved = {part: slow["parts"][part] - fast["parts"][part] for part in PARTS}
    part = max(saved, key=lambda name: saved[name])
    return (
        f"Most of the difference is {PARTS[part]}: {_ms(fast['parts'][part])} instead of "
        f"{_ms(slow['parts'][part])}."
    )


def _composition(ours: Mapping[str, Any]) -> str:
    """How the step divides, largest part first, and how far it is from the ideal."""
    total = ours["step_seconds"]["mean"]
    parts = sorted(PARTS, key=lambda part: -ours["parts"][part])
    shares = [
        f"{100 * ours['parts'][p] / total:.0f} % {PARTS[p]}" for p in parts if ours["parts"][p]
    ]
    return f"What is left is {', '.join(shares)}; {_above(ours)}."


def _limit(ours: Mapping[str, Any]) -> str:
    part = max(PARTS, key=lambda name: ours["parts"][name])
    share = 100 * ours["parts"][part] / ours["step_seconds"]["mean"]
    return f"The limit is {PARTS[part]}, {share:.0f} % of the step; {_above(ours)}."


def _above(ours: Mapping[str, Any]) -> str:
    return f"the step is {100 * (ours['ratio_to_ideal'] - 1):.1f} % above the ideal"


def draw_table(summary: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{'':<24}{'step ms':^18}{'× ideal':>9}{'forward MB':^18}{'compute':^14}{'tokens':^14}"
        f"{'workspace':>11}"
    )
    yield (
        f"{'':<24}{'mean':>9}{'worst':>9}{'mean':>9}{'mean':>9}{'(inter)':>9}"
        f"{'mean':>8}{'worst':>6}{'mean':>8}{'worst':>6}{'MB':>11}  split (batches)"
    )
    for name, numbers in summary["methods"].items():
        yield _row(name, numbers)
    wins, count = summary["wins"], summary["num_batches"]
    yield ""
    yield (
        f"dyncp against the best static method of each batch: faster in {wins['faster']}, as fast "
        f"in {wins['equal']}, slower in {wins['slower']} of {count}"
    )


def _row(name: str, numbers: Mapping[str, Any]) -> str:
    step, compute = numbers["step_seconds"], numbers["compute_max_over_mean"]
    tokens = numbers["tokens_max_over_mean"]
    return (
        f"{name:<24}{1e3 * step['mean']:>9.2f}{1e3 * step['worst']:>9.2f}"
        f"{numbers['ratio_to_ideal']:>9.3f}{numbers['forward_bytes'] / 1e6:>9.1f}"
        f"{numbers['inter_node_bytes'] / 1e6:>9.1f}"
        f"{compute['mean']:>8.2f}{compute['worst']:>6.2f}{tokens['mean']:>8.2f}"
        f"{tokens['worst']:>6.2f}{numbers['peak_workspace_bytes'] / 1e6:>11.1f}  "
        f"{_splits(name, numbers['solvers'])}"
    )


def _splits(name: str, solvers: Mapping[str, int]) -> str:
    """Degrees of static methods, and for ours the solvers themselves, the most frequent first."""
    named = [
        f"{solver if name == OURS else solver.partition('/')[2] or 'fair share'} ({count})"
        for solver, count in solvers.items()
    ]
    more = len(named) - MOST_SPLITS
    return ", ".join(named[:MOST_SPLITS]) + (f" and {more} more" if more > 0 else "")
