"""`dyncp simulate`: many batches under every method, side by side, and a verdict."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from typing import Any

from dyncp.cli import options
from dyncp.cli.command import Command
from dyncp.cli.progress import Progress
from dyncp.cli.simulate_batches import Lengths, find_lengths
from dyncp.cli.simulate_methods import STATIC_METHODS, Outcome, Setting, run_batch
from dyncp.cli.simulate_summary import summarise, verdict
from dyncp.cli.simulate_table import draw_table
from dyncp.topology import Topology


def add_options(parser: ArgumentParser) -> None:
    options.add_lengths_options(parser, listed=False)
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
    options.add_cluster_options(parser)
    for name, what in (("bandwidth", "bandwidth"), ("latency", "latency")):
        parser.add_argument(
            f"--{name}", type=float, default=1.0, help=f"all links have this many times the {what}"
        )
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="ranks are up to this share slower, at random"
    )
    options.add_attention_options(parser)
    options.add_solver_options(parser)
    parser.add_argument(
        "--methods",
        default=",".join(STATIC_METHODS),
        help=f"static methods to compare with (default all: {', '.join(STATIC_METHODS)})",
    )
    options.add_limit_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the solver and of --jitter")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: Namespace) -> int:
    setting, lengths = _setting(args), find_lengths(args)
    progress, count = Progress(), len(lengths.batches)
    outcomes = []
    for number, batch_lengths in enumerate(lengths.batches, start=1):
        batch = options.make_batch(args, batch_lengths)
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
    config = replace(options.config_of(args), seed=args.seed)
    planned, methods = _topology(args), _methods(args.methods)
    topology = planned.jittered(args.jitter, args.seed) if args.jitter else planned
    cost, model = options.cost_of(args), options.model_of(args)
    return Setting(planned, topology, cost, model, config, methods)


def _topology(args: Namespace) -> Topology:
    if not args.bandwidth > 0:
        raise ValueError(f"--bandwidth is {args.bandwidth}; allowed are numbers above 0")
    if not args.latency >= 0:
        raise ValueError(f"--latency is {args.latency}; allowed are numbers from 0 on")
    topology = options.topology_of(args).scaled(args.bandwidth, args.latency)
    if not 0 <= args.jitter < 1:
        raise ValueError(f"--jitter is {args.jitter}; allowed are shares from 0 to below 1")
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
