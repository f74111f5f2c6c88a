"""`dyncp train`: trains a small decoder under dyncp and compares it with a run in one process."""

import json
import os
import signal
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dyncp.cli.arguments import Command
from dyncp.cli.launch import launch, open_world, under_torchrun
from dyncp.cli.output import Progress
from dyncp.cli.train_report import StepTable, conclusion, summarise
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
# Files of the folder in which processes find the reference's losses and leave their results.
REFERENCE, RESULTS = "reference.json", "results.json"


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
    if under_torchrun():
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


def run_reference(config: TrainConfig) -> list[float]:
    """Losses of the run in one process."""
    from dyncp.train.loop import open_corpus, train_in_one_process

    progress, losses = Progress(), []
    progress.show(f"one process: step 1 of {config.steps}")
    for result in train_in_one_process(config, open_corpus(config)):
        losses.append(result.loss)
        if result.step < config.steps:
            done = f"last loss {result.loss:.4f}, {result.seconds:.1f} s"
            progress.show(f"one process: step {result.step + 1} of {config.steps} ({done})")
    progress.clear()
    return losses


def run_virtual(
    config: TrainConfig, ranks: int, reference: Sequence[float] | None, *, to_stderr: bool
) -> list["StepResult"]:
    """All ranks in this process."""
    from dyncp.train.loop import open_corpus, train_on_ranks

    table = StepTable(config.steps, reference, to_stderr=to_stderr)
    return _collect(train_on_ranks(config, open_corpus(config), ranks), table)


def run_processes(
    words: Sequence[str], ranks: int, reference: Sequence[float] | None, *, to_stderr: bool
) -> tuple[int, list["StepResult"]]:
    """Runs the command line `words` on `ranks` processes: exit code and results."""
    from dyncp.train.loop import StepResult

    Progress().say(f"starting {ranks} processes ...")
    with TemporaryDirectory(prefix="dyncp-") as folder:
        if reference is not None:
            Path(folder, REFERENCE).write_text(json.dumps(reference))
        code = launch([*words, "--exchange", folder], ranks, to_stderr=to_stderr)
        results = [] if code else json.loads(Path(folder, RESULTS).read_text())
    return code, [StepResult(**result) for result in results]


def run_as_rank(
    config: TrainConfig, exchange: Path | None, *, to_stderr: bool
) -> list["StepResult"]:
    """This process is one rank of torchrun; only rank 0 prints, and gets results."""
    from dyncp.train.loop import open_corpus, train_on_ranks

    table = None
    with open_world(config.device) as world:
        # torchrun stops its ranks by SIGTERM: the loader has a process to end.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        if world.first:
            table = StepTable(config.steps, _reference(exchange), to_stderr=to_stderr)
        results = _collect(train_on_ranks(config, open_corpus(config)), table)
    if world.first and exchange is not None:
        Path(exchange, RESULTS).write_text(json.dumps([asdict(result) for result in results]))
    return results if world.first else []


def _reference(exchange: Path | None) -> list[float] | None:
    path = None if exchange is None else exchange / REFERENCE
    return json.loads(path.read_text()) if path is not None and path.exists() else None


def _collect(steps: Iterable["StepResult"], table: StepTable | None) -> list["StepResult"]:
    results = []
    for result in steps:
        results.append(result)
        if table is not None:
            table.add(result)
    return results


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
