"""`dyncp train`: trains a small decoder under dyncp and compares it with a run in one process."""

import json
import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dyncp.cli.command import Command
from dyncp.cli.progress import Progress
from dyncp.cli.train_report import conclusion, summarise
from dyncp.cli.train_runs import run_as_rank, run_processes, run_reference, run_virtual
from dyncp.train.config import SIZES, TrainConfig

if TYPE_CHECKING:
    from dyncp.train.loop import StepResult

RANKS = 4
DISAGREEMENT = 1

NEXT = """\
Next:
  dyncp train --steps 3 --mask lambda_shaped    another mask: fewer pairs, fewer bytes
  dyncp train --steps 3 --ranks 2               another number of ranks
  dyncp train --corpus DIR                      your own text files
  docs/training.md                              how to write this loop yourself"""


def add_options(parser: ArgumentParser) -> None:
    default = TrainConfig()
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--ranks", type=int, help=f"processes to train on (default {RANKS})")
    ranks.add_argument(
        "--virtual-ranks", type=int, metavar="N", help="N ranks inside one process instead"
    )
    for name, kind, text in (
        ("steps", int, "optimiser steps"),
        ("model", str, f"size of the decoder: {', '.join(SIZES)}"),
        ("mask", str, "NAME[:key=value,...]; `dyncp masks` lists them"),
        ("max-length", int, "tokens at which documents are cut"),
        ("solver", str, "how blocks and tiles get their ranks"),
        ("kernel", str, "attention kernel"),
        ("device", str, "cpu or cuda"),
        ("seed", int, "of weights, order of documents, and solver"),
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=value, help=f"{text} (default {value})")
    parser.add_argument(
        "--tokens-per-batch", type=int, help="of all ranks together (default: twice --max-length)"
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=default.learning_rate,
        help="learning rate (default %(default)s)",
    )
    parser.add_argument(
        "--corpus", metavar="DIR", help="folder of text files (default: Python's standard library)"
    )
    parser.add_argument("--no-reference", action="store_true", help="skip the run in one process")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout; the table goes to stderr"
    )
    parser.add_argument("--exchange", type=Path, help=SUPPRESS)


def run(args: Namespace) -> int:
    config = _config(args)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # torchrun started this process
        return _run_under_torchrun(args, config, int(os.environ["WORLD_SIZE"]))
    ranks = _num_ranks(args)
    Progress().say(_describe(config, ranks))
    from dyncp.train.loop import check_hardware  # late: torch takes seconds to import

    check_hardware(config, processes=1 if args.virtual_ranks else ranks)
    reference = None if args.no_reference else run_reference(config)
    if args.virtual_ranks or ranks == 1:
        results = run_virtual(config, ranks, reference, to_stderr=args.json)
    else:
        code, results = run_processes(args.words, ranks, reference, to_stderr=args.json)
        if code:
            Progress().say(f"dyncp: error: the ranks ended with exit code {code}; see above")
            return code
    return _conclude(args, config, ranks, results, reference)


def _run_under_torchrun(args: Namespace, config: TrainConfig, ranks: int) -> int:
    if args.virtual_ranks or args.ranks not in (None, ranks):
        raise ValueError(
            f"torchrun started {ranks} processes, which are the ranks; leave --ranks and "
            "--virtual-ranks out, or start without torchrun"
        )
    results = run_as_rank(config, args.exchange, to_stderr=args.json and args.exchange is None)
    if results and args.exchange is None:
        return _conclude(args, config, ranks, results, None)
    return 0


def _num_ranks(args: Namespace) -> int:
    given = [number for number in (args.ranks, args.virtual_ranks) if number is not None]
    ranks: int = given[0] if given else RANKS
    if ranks < 1:
        raise ValueError(f"{ranks} ranks were asked for; at least 1 is needed")
    return ranks


def _describe(config: TrainConfig, ranks: int) -> str:
    size = config.decoder
    return "\n".join(
        [
            f"model   {config.model}: {size.layers} layers, hidden {size.hidden}, "
            f"{size.q_heads} q and {size.kv_heads} kv heads",
            f"corpus  {config.corpus or 'the Python standard library'}, documents of up to "
            f"{config.max_length:,} tokens",
            f"batch   up to {config.batch_tokens:,} tokens; {config.steps} steps",
            f"plan    mask {config.mask}, solver {config.solver}, {ranks} ranks",
        ]
    )


def _conclude(
    args: Namespace,
    config: TrainConfig,
    ranks: int,
    results: Sequence["StepResult"],
    reference: Sequence[float] | None,
) -> int:
    summary = summarise(config, ranks, results, reference)
    stream = sys.stderr if args.json else sys.stdout
    print("", *conclusion(summary), "", NEXT, sep="\n", file=stream, flush=True)
    if args.json:
        print(json.dumps(summary))
    if summary["agrees"] is not False:
        return 0
    Progress().say(f"dyncp: error: {conclusion(summary)[0]}")
    return DISAGREEMENT


def _config(args: Namespace) -> TrainConfig:
    return TrainConfig(
        model=args.model,
        corpus=args.corpus,
        max_length=args.max_length,
        tokens_per_batch=args.tokens_per_batch,
        mask=args.mask,
        steps=args.steps,
        learning_rate=args.lr,
        seed=args.seed,
        solver=args.solver,
        kernel=args.kernel,
        device=args.device,
    )


command = Command(
    name="train",
    summary="train a small decoder on several ranks and compare its losses with one process",
    examples=(
        "dyncp train",
        "dyncp train --ranks 2 --steps 3 --mask sliding_window:window=1024",
        "torchrun --nproc-per-node 4 -m dyncp train --steps 5",
    ),
    add_options=add_options,
    run=run,
)
