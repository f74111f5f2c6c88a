"""`dyncp simulate`: many batches under every method, side by side, and a verdict."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dyncp.blocks import Batch
from dyncp.cli import arguments
from dyncp.cli.arguments import Command, check_tokens
from dyncp.cli.output import Progress
from dyncp.cli.plan import describe_traffic
from dyncp.cli.simulate_report import OURS, Outcome, draw_table, summarise, verdict
from dyncp.cost import CostModel, ModelConfig
from dyncp.placement import static_candidates
from dyncp.placement.static import STATIC_SOLVERS
from dyncp.planner import Candidate, PlannerConfig, Task, choose
from dyncp.samplers import parse_sample, read_lengths, sample_lengths
from dyncp.simulate import simulate_schedules
from dyncp.topology import Topology

STATIC_METHODS = tuple(solver.name for solver in STATIC_SOLVERS)


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


def add_options(parser: ArgumentParser) -> None:
    arguments.add_lengths_options(parser, listed=False)
    parser.add_argument(
        "--batches",
        type=int,
        default=8,
        help="how many: of a sample with seeds SEED, SEED+1, ..., of a file the first ones "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=131072,
        help="tokens of a batch; documents of a file are packed in order into batches of at most "
        "this many (default %(default)s)",
    )
    arguments.add_cluster_options(parser)
    for name in ("bandwidth", "latency"):
        parser.add_argument(
            f"--{name}", type=float, default=1.0, help=f"all links have this many times the {name}"
        )
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="ranks are up to this share slower, at random"
    )
    arguments.add_attention_options(parser)
    arguments.add_solver_options(parser)
    parser.add_argument(
        "--methods",
        default=",".join(STATIC_METHODS),
        help=f"static methods to compare with (default all: {', '.join(STATIC_METHODS)})",
    )
    arguments.add_limit_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the solver and of --jitter")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


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


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
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
    where = f"{setting.cost.profile.name}, {topology.machines} × {topology.ranks_per_machine} ranks"
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
    tokens, count = check_tokens(args), args.batches
    if count < 1:
        raise ValueError(f"--batches is {count}; at least 1 is needed")
    if args.sample is not None:
        return _draw(args.sample, tokens, count)
    packed = pack_documents(read_lengths(args.lengths_file), tokens, args.lengths_file)
    origin = f"{args.lengths_file}, {'the first ' if len(packed) > count else 'all '}"
    origin += f"{min(count, len(packed))} of {len(packed)}"
    return Lengths(tuple(map(tuple, packed[:count])), origin)


def _draw(sample: str, tokens: int, count: int) -> Lengths:
    name, seed = parse_sample(sample)
    drawn = [sample_lengths(name, tokens, seed + i) for i in range(count)]
    last = f" to {seed + count - 1}" if count > 1 else ""
    return Lengths(tuple(map(tuple, drawn)), f"{name}, seed {seed}{last}")


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
    return {method: _with_workspace(*found, setting) for method, found in best.items()}


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
        candidate = task.schedule(task.place(solver))
        yield methods if index == 0 else [solver.name.partition("/")[0]], candidate


def _with_workspace(outcome: Outcome, candidate: Candidate, setting: Setting) -> Outcome:
    plan = candidate.lower(setting.config.layout)
    return replace(outcome, workspace_bytes=plan.memory().peak)


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
        inter_machine_bytes=moved["inter_machine_bytes"],
        compute_max_over_mean=candidate.balance.compute_max_over_mean,
        tokens_max_over_mean=candidate.balance.tokens_max_over_mean,
    )


command = Command(
    name="simulate",
    summary="simulate many batches under dyncp and every static method, and say what to use",
    examples=(
        "dyncp simulate --sample ldc:0 --model llama3-8b",
        "dyncp simulate --lengths-file lengths.txt --tokens 65536 --topology h200 --machines 2",
        "dyncp simulate --sample longalign:0 --mask lambda_shaped --bandwidth 0.25 --batches 4",
    ),
    add_options=add_options,
    run=run,
)
