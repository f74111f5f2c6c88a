"""`dyncp simulate`: compares dyncp with all static methods on many batches, and gives a verdict."""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from dyncp.blocks import Batch
from dyncp.checks import whole_number
from dyncp.cli import arguments
from dyncp.cli.arguments import Progress, option
from dyncp.cli.plan import IF_NOT_AS_ASSUMED, describe_traffic
from dyncp.cost import IMPLEMENTATIONS, Profile
from dyncp.placement import STATIC_SOLVERS, find_solver, static_candidates
from dyncp.planner import AUTO, Candidate, Task, choose, surviving
from dyncp.samplers import parse_sample, read_lengths
from dyncp.simulate import Simulated
from dyncp.topology import Topology

STATIC_METHODS = tuple(solver.name for solver in STATIC_SOLVERS)
OURS = "dyncp"
# Steps that differ by less are equally fast: where blocks happen to end makes as much difference.
TIE = 0.005
# A smaller difference of the mean steps is too small to recommend either.
MARGIN = 0.02
PARTS = {
    "kernel_seconds": "attention kernels",
    "token_seconds": "per-token work",
    "traffic_seconds": "gradients and weights that nothing hides",
    "exposed_seconds": "exposed communication and waiting",
}
MOST_SPLITS = 3
EXAMPLES = (
    "dyncp simulate --sample ldc:0 --model llama3-8b",
    "dyncp simulate --lengths-file lengths.txt --tokens 65536 --topology h200 --nodes 2",
    "dyncp simulate --sample longalign:0 --mask lambda_shaped --bandwidth 0.25 --batches 4",
)

Tell = Callable[[str], None]


# One batch under one method, made by `_outcome`. A step takes `kernel_seconds` + `exposed_seconds`
# (of all attention layers) + `token_seconds`, each of the rank with the most, + `traffic_seconds`.
Outcome = Mapping[str, Any]
Batches = Sequence[Mapping[str, Outcome]]


def add_options(parser: ArgumentParser) -> None:
    arguments.add_lengths_options(parser, listed=False)
    text = "number of batches: drawn with seeds SEED, SEED+1, ..., or the first ones of the file"
    option(parser, "--batches", text, 8, metavar="N")
    text = "tokens of a batch; documents of a file are packed in order into at most this many"
    option(parser, "--tokens", text, 131072, metavar="N")
    for name in ("bandwidth", "latency"):
        option(parser, f"--{name}", f"multiply the {name} of all links by X", 1.0, metavar="X")
    text = "slow every rank down by a random fraction of up to X"
    option(parser, "--jitter", text, 0.0, metavar="X")
    arguments.add_planning_options(parser)
    text = f"static methods to compare with (default all: {','.join(STATIC_METHODS)})"
    option(parser, "--methods", text, metavar="NAME,...")
    option(parser, "--seed", "random seed of the solver and of --jitter", 0, metavar="N")
    arguments.add_json_option(parser)


def run(args: Namespace) -> int:
    model, config = arguments.model_of(args), arguments.config_of(args)
    cost = arguments.cost_of(args, model)
    topology, methods = _topology(args, cost.profile), _methods(args.methods)
    lengths, origin = find_lengths(args)
    progress, outcomes = Progress(), []
    for number, of_batch in enumerate(lengths, start=1):
        batch = arguments.make_batch(args.mask, of_batch)
        task = Task.of(batch, topology, cost.shape, config, cost, model)
        tell = partial(_tell, progress, f"batch {number} of {len(lengths)}")
        found = run_batch(task, methods, args.jitter, tell)
        outcomes.append(with_own_code(found, task, partial(arguments.make_batch, args.mask)))
    progress.clear()
    summary = summarise(outcomes)
    summary["verdict"] = verdict(summary, args.solver)
    each = zip(lengths, outcomes, strict=True)
    batches = [{"lengths": of_batch, "methods": methods} for of_batch, methods in each]
    arguments.show(
        args,
        summary | {"batches": batches},
        [
            f"{_sizes(lengths)} ({origin}), mask {args.mask}",
            f"{_cluster(args, topology)}; solver {args.solver}",
            "",
            *draw_table(summary),
            "",
            f"ideal without communication and imbalance: {1e3 * summary['ideal_seconds']:.2f} ms "
            "per step; static methods use their best split in each batch and run like dyncp's "
            "plans; own code: in their own implementation; compute, tokens: largest rank / mean",
            "",
            *fragility(summary),
            summary["verdict"],
        ],
    )
    return 0


def _tell(progress: Progress, where: str, name: str) -> None:
    progress.show(f"{where}: {name} ...")


def _topology(args: Namespace, profile: Profile) -> Topology:
    if not args.bandwidth > 0:
        raise ValueError(f"--bandwidth is {args.bandwidth}; it must be positive")
    if not args.latency >= 0:
        raise ValueError(f"--latency is {args.latency}; it must not be negative")
    if not 0 <= args.jitter < 1:
        raise ValueError(f"--jitter is {args.jitter}; it must be at least 0 and below 1")
    return arguments.topology_of(args, profile).scaled(args.bandwidth, args.latency)


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


def _sizes(lengths: Sequence[list[int]]) -> str:
    sizes = [sum(of_batch) for of_batch in lengths]
    low, high = min(sizes), max(sizes)
    tokens = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    return f"{len(sizes)} batch{'es' if len(sizes) > 1 else ''} of {tokens} tokens"


def _cluster(args: Namespace, topology: Topology) -> str:
    text = f"{topology.name}, {topology.nodes} × {topology.ranks_per_node} ranks"
    text += f" of {args.tp} GPUs" if args.tp > 1 else ""
    for name, value in (("bandwidth", args.bandwidth), ("latency", args.latency)):
        text += "" if value == 1 else f", {name} × {value:g}"
    text += f", jitter {args.jitter:g}" if args.jitter else ""
    if args.attention_only:
        return f"{text}; attention alone, one layer"
    return f"{text}; {f'model {args.model}' if args.model else 'a usual decoder with these heads'}"


MOST_BATCHES = 100_000  # all lengths are drawn first


def find_lengths(args: Namespace) -> tuple[list[list[int]], str]:
    """The sequence lengths of every batch, and a text that says where they come from."""
    count = whole_number("--batches", args.batches, 1, MOST_BATCHES)
    tokens = whole_number("--tokens", args.tokens, 1)
    if args.sample is not None:
        name, seed = parse_sample(args.sample)
        last = f" to {seed + count - 1}" if count > 1 else ""
        drawn = [arguments.draw_lengths(args, args.sample, number) for number in range(count)]
        return drawn, f"{name}, seed {seed}{last}"
    packed = pack_documents(read_lengths(args.lengths_file), tokens, args.lengths_file)
    some = f"{'the first' if len(packed) > count else 'all'} {min(count, len(packed))}"
    return packed[:count], f"{args.lengths_file}, {some} of {len(packed)}"


def pack_documents(lengths: Sequence[int], tokens: int, path: Path) -> list[list[int]]:
    """Packs documents in file order into batches of at most `tokens` tokens.

    With 8 tokens, lengths 5 3 4 4 give [5, 3] [4, 4], and 5 4 3 4 give [5] [4, 3] [4].
    """
    batches: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths, start=1):
        if length > tokens:
            raise ValueError(
                f"lengths file {path}: document {number} has {length:,} tokens, but a batch has at "
                f"most {tokens:,}; raise --tokens, or cut long documents"
            )
        if length > room:
            batches.append([])
            room = tokens
        batches[-1].append(length)
        room -= length
    return batches


def run_batch(task: Task, methods: Sequence[str], jitter: float, tell: Tell) -> dict[str, Outcome]:
    """The outcome of every method, ours first. Plans do not know of the jitter; runs have it."""

    def run(candidate: Candidate) -> Simulated:
        if not jitter:
            return candidate.simulated
        jittered = task.topology.jittered(jitter, task.config.seed)
        return replace(task, topology=jittered).simulate(candidate)

    tell(task.config.solver)
    ours = choose(task).candidate
    statics = best_splits(task, methods, run, tell)
    outcomes = {method: _outcome(*best, task) for method, best in statics.items()}
    others = [candidate for candidate, _ in statics.values()]
    survives = surviving(task, ours, others) if others else {}
    return {OURS: {**_outcome(ours, run(ours), task), "surviving": survives}} | outcomes


def with_own_code(
    found: Mapping[str, Outcome], task: Task, make_batch: Callable[[Sequence[int]], Batch]
) -> dict[str, Outcome]:
    """Adds the step of every static method, with the same split, in its own code (None if that is
    not modelled): eager, step by step, with padded sequences."""
    outcomes = dict[str, Outcome]()
    for name, outcome in found.items():
        code, seconds = IMPLEMENTATIONS.get(name), None
        if code is not None and name != OURS:
            solver = find_solver(outcome["solver"]).fitted(task.shape, task.topology)
            degrees = solver.degrees
            contexts = 1 if degrees is None else (degrees.ranks or 1) // (degrees.heads or 1)
            shape = replace(task.shape, partial_dtype=code.partial_dtype)
            cost = replace(task.cost, shape=shape, implementation=code)
            padded = make_batch(code.padded(task.batch.lengths, contexts))
            own = Task.of(padded, task.topology, shape, task.config, cost, task.model)
            seconds = own.follow(own.place(solver)).simulated.step_seconds
        outcomes[name] = {**outcome, "own_code_seconds": seconds}
    return outcomes


def best_splits(
    task: Task, methods: Sequence[str], run: Callable[[Candidate], Simulated], tell: Tell
) -> dict[str, tuple[Candidate, Simulated]]:
    """For every static method, the DP × CP split with the shortest step in `run`. The first split
    is data parallelism alone, which all methods share."""
    best: dict[str, tuple[Candidate, Simulated]] = {}
    if not methods:
        return best
    splits = static_candidates(task.batch.lengths, task.shape, task.topology, tuple(methods))
    for index, solver in enumerate(splits):
        tell(solver.name)
        candidate = task.follow(task.place(solver))
        simulated = run(candidate)
        for name in methods if index == 0 else [solver.name.partition("/")[0]]:
            if name not in best or simulated.step_seconds < best[name][1].step_seconds:
                best[name] = candidate, simulated
    return best


def _outcome(candidate: Candidate, simulated: Simulated, task: Task) -> Outcome:
    exposed = simulated.num_layers * simulated.exposed_seconds
    forward = [schedule for schedule, _ in candidate.schedules.values()]
    moved = describe_traffic(candidate, task.topology, forward)
    return {
        "solver": candidate.placement.solver,
        "static": candidate.placement.static,
        "kernel_seconds": simulated.attention_seconds - exposed,
        "exposed_seconds": exposed,
        "token_seconds": simulated.token_seconds,
        "traffic_seconds": simulated.traffic_seconds,
        "step_seconds": simulated.step_seconds,
        "ideal_seconds": simulated.ideal_seconds,
        "forward_bytes": moved["bytes"],
        "inter_node_bytes": moved["inter_node_bytes"],
        "compute_max_over_mean": candidate.balance.compute_max_over_mean,
        "tokens_max_over_mean": candidate.balance.tokens_max_over_mean,
        "workspace_bytes": candidate.assemble(task.config.layout).memory().peak,
    }


def summarise(batches: Batches) -> dict[str, Any]:
    """Numbers of every method (ours first, then the static ones, fastest first), the best static
    method, and how often ours is faster."""
    ideal = [min(o["ideal_seconds"] for o in outcomes.values()) for outcomes in batches]
    methods = {
        name: _method([outcomes[name] for outcomes in batches], ideal) for name in batches[0]
    }
    order = sorted(methods, key=lambda name: (name != OURS, methods[name]["step_seconds"]["mean"]))
    return {
        "num_batches": len(batches),
        "ideal_seconds": fmean(ideal),
        "methods": {name: methods[name] for name in order},
        "best_static": next(name for name in order if name != OURS),
        "wins": _wins(batches),
        "surviving": _surviving(batches),
    }


def _method(outcomes: Sequence[Outcome], ideal: Sequence[float]) -> dict[str, Any]:
    def mean(field: str) -> float:
        return fmean(o[field] for o in outcomes)

    def both(field: str) -> dict[str, float]:
        return {"mean": mean(field), "worst": max(o[field] for o in outcomes)}

    modelled = all(outcome["own_code_seconds"] is not None for outcome in outcomes)
    return {
        "step_seconds": both("step_seconds"),
        "own_code_seconds": mean("own_code_seconds") if modelled else None,
        "ratio_to_ideal": fmean(
            o["step_seconds"] / least for o, least in zip(outcomes, ideal, strict=True)
        ),
        "forward_bytes": mean("forward_bytes"),
        "inter_node_bytes": mean("inter_node_bytes"),
        "compute_max_over_mean": both("compute_max_over_mean"),
        "tokens_max_over_mean": both("tokens_max_over_mean"),
        "peak_workspace_bytes": max(o["workspace_bytes"] for o in outcomes),
        "parts": {part: mean(part) for part in PARTS},
        "static_batches": sum(o["static"] for o in outcomes),
        "solvers": dict(Counter(o["solver"] for o in outcomes).most_common()),
    }


def _wins(batches: Batches) -> dict[str, Any]:
    """In how many batches ours is faster, equally fast or slower than the best static method of
    that batch, and the largest ratio of ours to the best."""
    ratios = []
    for outcomes in batches:
        best = min(o["step_seconds"] for name, o in outcomes.items() if name != OURS)
        ratios.append(outcomes[OURS]["step_seconds"] / best)
    faster, slower = sum(r < 1 - TIE for r in ratios), sum(r > 1 + TIE for r in ratios)
    equal = len(ratios) - faster - slower
    return {"faster": faster, "equal": equal, "slower": slower, "worst_ratio": max(ratios)}


def _surviving(batches: Batches) -> dict[str, dict[str, float]]:
    """The step of the best static method over ours on other clusters: mean and least."""
    found = [outcomes[OURS].get("surviving", {}) for outcomes in batches]
    by_name = {name: [ratios[name] for ratios in found] for name in found[0]}
    return {name: {"mean": fmean(x), "least": min(x)} for name, x in by_name.items()}


def fragility(summary: Mapping[str, Any]) -> Iterator[str]:
    """Lines that say what remains of the gain if the cluster is not quite as assumed."""
    found = summary["surviving"]
    if not found:
        return
    parts = [f"{name} {at['mean']:.2f} ({at['least']:.2f})" for name, at in found.items()]
    yield f"{IF_NOT_AS_ASSUMED}, mean (least): {', '.join(parts)}"
    yield ""


def verdict(summary: Mapping[str, Any], solver: str) -> str:
    """A text that says whether to use dyncp, and why."""
    best, count = summary["best_static"], summary["num_batches"]
    ours, static = summary["methods"][OURS], summary["methods"][best]
    mine, theirs = ours["step_seconds"]["mean"], static["step_seconds"]["mean"]
    batches = f"these {count} batches" if count > 1 else "this batch"
    given = f"on {batches} a step takes {_ms(mine)}"
    if theirs > mine * (1 + MARGIN):
        text = (
            f"Use dyncp: {given}, {theirs / mine:.2f}× faster than the best static method "
            f"({best}, {_ms(theirs)}), {_against_each(summary)}. {_gain(ours, static)} What is "
            f"left is {', '.join(_shares(ours))}"
        )
    elif theirs * (1 + MARGIN) >= mine:
        text = (
            f"Not worth it: {given}, and the best static method ({best}, {_ms(theirs)}) is within "
            f"{100 * MARGIN:.0f} %. A step is {', '.join(_shares(ours))}"
        )
    else:
        return (
            f"Not worth it: {given}, and the best static method ({best}, {_ms(theirs)}) is "
            f"{mine / theirs:.2f}× faster. {_gain(static, ours)}{_hint(summary, solver)}"
        )
    above = 100 * (ours["ratio_to_ideal"] - 1)
    return f"{text}; the step is {above:.1f} % above the ideal.{_hint(summary, solver)}"


def _hint(summary: Mapping[str, Any], solver: str) -> str:
    """A sentence on the solver `auto`: that it chose static methods, or that it would help."""
    taken, count = summary["methods"][OURS]["static_batches"], summary["num_batches"]
    if solver == AUTO and taken:
        return f" The planner itself chose a static method in {taken} of {count} batches."
    if solver != AUTO and summary["wins"]["slower"]:
        return " --solver auto uses the best of both in every batch."
    return ""


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
    """A sentence on the part of the step that most of the difference comes from."""
    saved = {part: slow["parts"][part] - fast["parts"][part] for part in PARTS}
    part = max(saved, key=lambda name: saved[name])
    return (
        f"Most of the difference is {PARTS[part]}: {_ms(fast['parts'][part])} instead of "
        f"{_ms(slow['parts'][part])}."
    )


def _shares(ours: Mapping[str, Any]) -> list[str]:
    """The parts of the step in percent, largest first."""
    total, parts = ours["step_seconds"]["mean"], ours["parts"]
    largest_first = sorted(PARTS, key=lambda part: -parts[part])
    return [f"{100 * parts[p] / total:.0f} % {PARTS[p]}" for p in largest_first if parts[p]]


def draw_table(summary: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{'':<24}{'step ms':^18}{'own':>9}{'× ideal':>9}{'forward MB':^18}{'compute':^14}"
        f"{'tokens':^14}{'workspace':>11}"
    )
    yield (
        f"{'':<24}{'mean':>9}{'worst':>9}{'code':>9}{'mean':>9}{'mean':>9}{'(inter)':>9}"
        f"{'mean':>8}{'worst':>6}{'mean':>8}{'worst':>6}{'MB':>11}  split (batches)"
    )
    for name, numbers in summary["methods"].items():
        yield _row(name, numbers)
    wins, count = summary["wins"], summary["num_batches"]
    yield ""
    yield (
        f"dyncp against the best static method of each batch: faster in {wins['faster']}, equally "
        f"fast in {wins['equal']}, slower in {wins['slower']} of {count} batches"
    )


def _row(name: str, numbers: Mapping[str, Any]) -> str:
    step, compute = numbers["step_seconds"], numbers["compute_max_over_mean"]
    tokens = numbers["tokens_max_over_mean"]
    seconds = numbers["own_code_seconds"]
    own = "-" if seconds is None else f"{1e3 * seconds:.2f}"
    return (
        f"{name:<24}{1e3 * step['mean']:>9.2f}{1e3 * step['worst']:>9.2f}{own:>9}"
        f"{numbers['ratio_to_ideal']:>9.3f}{numbers['forward_bytes'] / 1e6:>9.1f}"
        f"{numbers['inter_node_bytes'] / 1e6:>9.1f}"
        f"{compute['mean']:>8.2f}{compute['worst']:>6.2f}{tokens['mean']:>8.2f}"
        f"{tokens['worst']:>6.2f}{numbers['peak_workspace_bytes'] / 1e6:>11.1f}  "
        f"{_splits(name, numbers['solvers'])}"
    )


def _splits(name: str, solvers: Mapping[str, int]) -> str:
    """The degrees that a static method used, or the solvers that dyncp used, by frequency."""
    named = [
        f"{solver if name == OURS else solver.partition('/')[2] or 'fair share'} ({count})"
        for solver, count in solvers.items()
    ]
    more = len(named) - MOST_SPLITS
    return ", ".join(named[:MOST_SPLITS]) + (f" and {more} more" if more > 0 else "")
