"""`dyncp train`: trains a small Llama under dyncp and compares it with plain Transformers."""

import json
import math
import os
import signal
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TextIO

from dyncp import masks
from dyncp.checks import whole_number
from dyncp.cli.arguments import Progress, launch, open_world, option, under_torchrun
from dyncp.planner import PlannerConfig

RANKS, DEVICES = 4, ("cpu", "cuda")
DISAGREEMENT = 1
# Largest difference of a loss between the runs; fp32 sums in another order: 1e-6 after 8 steps.
TOLERANCE = 1e-4
# Files of the folder in which processes find the losses of one process, and leave their rows.
REFERENCE, ROWS = "reference.json", "rows.json"
HEADER = (
    " step  tokens  docs  longest    loss  one process  difference"
    "  moved MB  ring MB  imbalance  seconds"
)
NEXT = """\
Next:
  dyncp train --mask lambda_shaped     another mask: fewer pairs, fewer bytes
  dyncp train --ranks 2                another number of ranks
  dyncp train --corpus DIR             your own text files
  examples/train_llama.py              the loop, to be copied: docs/transformers.md"""

SUMMARY = "train a small Llama on several ranks and compare its losses with one process"
EXAMPLES = (
    "dyncp train",
    "dyncp train --ranks 2 --steps 3 --mask sliding_window:window=1024",
    "dyncp train --virtual-ranks 4 --device cuda",
    "torchrun --nproc-per-node 4 -m dyncp train --steps 5",
)


def add_options(parser: ArgumentParser) -> None:
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--ranks", type=int, help=f"processes to train on (default {RANKS})")
    ranks.add_argument(
        "--virtual-ranks", type=int, metavar="N", help="N ranks inside one process instead"
    )
    option(parser, "--steps", "optimiser steps", 6)
    option(parser, "--mask", "NAME[:key=value,...]; `dyncp masks` lists them", "causal")
    option(parser, "--max-length", "tokens at which documents are cut", 4096)
    option(parser, "--solver", "how blocks and tiles get their ranks", PlannerConfig().solver)
    option(parser, "--kernel", "attention kernel", "auto")
    option(parser, "--device", "cpu or cuda", "cpu")
    option(parser, "--seed", "of weights, order of documents, and solver", 0)
    tokens = "of all ranks together (default: twice --max-length)"
    option(parser, "--tokens-per-batch", tokens, type=int)
    option(parser, "--corpus", "folder of text files (default: Python's standard library)")
    parser.add_argument("--no-reference", action="store_true", help="skip the run in one process")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout; the table goes to stderr"
    )
    parser.add_argument("--exchange", type=Path, help=SUPPRESS)


def run(args: Namespace) -> int:
    _check(args)
    runs = _runs()
    if under_torchrun():
        return _run_as_rank(args, runs, int(os.environ["WORLD_SIZE"]))
    ranks = next((n for n in (args.ranks, args.virtual_ranks) if n is not None), RANKS)
    runs.check_hardware(args, processes=1 if args.virtual_ranks else ranks)
    reference = None if args.no_reference else _losses_of_one_process(args, runs)
    if args.virtual_ranks or ranks == 1:
        stream = sys.stderr if args.json else sys.stdout
        rows = print_table(runs.train_on_ranks(args, ranks), reference, stream)
    else:
        code, rows = _run_processes(args, ranks, reference)
        if code:
            Progress().say(f"dyncp: error: the ranks ended with exit code {code}; see above")
            return code
    return conclude(args, ranks, rows, reference)


def _check(args: Namespace) -> None:
    for field, least in (("steps", 1), ("max_length", 2), ("ranks", 1), ("virtual_ranks", 1)):
        if getattr(args, field) is not None:
            whole_number(f"--{field.replace('_', '-')}", getattr(args, field), least)
    if args.tokens_per_batch is not None and args.tokens_per_batch < args.max_length:
        raise ValueError(
            f"--tokens-per-batch is {args.tokens_per_batch}, less than the longest document "
            f"(--max-length {args.max_length}); raise the one or lower the other"
        )
    if args.device not in DEVICES:
        raise ValueError(f"--device is {args.device!r}; choose one of {', '.join(DEVICES)}")
    masks.by_name(args.mask)
    PlannerConfig(solver=args.solver)


def _runs() -> ModuleType:
    """Loaded late: torch and Transformers take seconds to import."""
    try:
        import transformers as _  # noqa: F401
    except ImportError:
        raise ValueError(
            "dyncp train trains a Transformers model, and transformers is not installed; "
            "pip install 'dyncp[transformers]'"
        ) from None
    from dyncp.cli import train_run

    return train_run


def _losses_of_one_process(args: Namespace, runs: ModuleType) -> list[float]:
    progress, losses = Progress(), []
    progress.show(f"one process, plain Transformers: step 1 of {args.steps}")
    for row in runs.train_plain(args):
        losses.append(row["loss"])
        if row["step"] < args.steps:
            done = f"loss {row['loss']:.4f}, {row['seconds']:.1f} s"
            progress.show(f"one process: step {row['step'] + 1} of {args.steps} (last: {done})")
    progress.clear()
    return losses


def _run_processes(
    args: Namespace, ranks: int, reference: Sequence[float] | None
) -> tuple[int, list[Any]]:
    """Runs this command line on `ranks` processes: exit code and rows."""
    Progress().say(f"starting {ranks} processes ...")
    with TemporaryDirectory(prefix="dyncp-") as folder:
        Path(folder, REFERENCE).write_text(json.dumps(reference))
        words = ["-m", "dyncp", *args.words, "--exchange", folder]
        code = launch(words, ranks, to_stderr=args.json)
        return code, [] if code else json.loads(Path(folder, ROWS).read_text())


def _run_as_rank(args: Namespace, runs: ModuleType, ranks: int) -> int:
    """This process is one rank of torchrun's; rank 0 prints."""
    if args.virtual_ranks or args.ranks not in (None, ranks):
        raise ValueError(
            f"torchrun started {ranks} processes, which are the ranks; leave --ranks and "
            "--virtual-ranks out, or start without torchrun"
        )
    folder = args.exchange
    reference = None if folder is None else json.loads((folder / REFERENCE).read_text())
    with open_world(args.device) as world:
        # torchrun stops its ranks by SIGTERM: the loader has a process to end.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        steps = runs.train_on_ranks(args)
        stream = sys.stderr if args.json and folder is None else sys.stdout
        rows = print_table(steps, reference, stream if world.first else None)
    if folder is None and world.first:
        return conclude(args, ranks, rows, None)
    if world.first:
        (folder / ROWS).write_text(json.dumps(rows))
    return 0


def print_table(
    rows: Iterable[Any], reference: Sequence[float] | None, stream: TextIO | None
) -> list[Any]:
    """Prints rows as they come; `reference` are the losses of one process."""
    found = []
    for row in rows:
        found.append(row)
        if stream is not None:
            head = f"{HEADER}\n" if len(found) == 1 else ""
            print(f"{head}{_line(row, reference)}", file=stream, flush=True)
    return found


def _line(row: Any, reference: Sequence[float] | None) -> str:
    compared = f"{'-':>13}{'-':>12}"
    if reference is not None:
        alone = reference[row["step"] - 1]
        compared = f"{alone:>13.4f}{abs(row['loss'] - alone):>12.1e}"
    return (
        f"{row['step']:>5}{row['tokens']:>8,}{row['documents']:>6}{row['longest']:>9,}"
        f"{row['loss']:>8.4f}{compared}{row['moved_bytes'] / 1e6:>10,.1f}"
        f"{row['ring_bytes'] / 1e6:>9,.1f}{row['compute_imbalance']:>11.2f}{row['seconds']:>9.1f}"
    )


def conclude(
    args: Namespace, ranks: int, rows: Sequence[Any], reference: Sequence[float] | None
) -> int:
    """Prints what was found, and returns the exit code."""
    summary = summarise(args, ranks, rows, reference)
    stream = sys.stderr if args.json else sys.stdout
    print("", *summary["conclusion"], "", NEXT, sep="\n", file=stream, flush=True)
    if args.json:
        print(json.dumps(summary))
    if summary["agrees"] is not False:
        return 0
    Progress().say(f"dyncp: error: {summary['conclusion'][0]}")
    return DISAGREEMENT


def summarise(
    args: Namespace, ranks: int, rows: Sequence[Any], reference: Sequence[float] | None
) -> dict[str, Any]:
    """The JSON object."""
    losses = [row["loss"] for row in rows]
    difference = None if reference is None else largest_difference(losses, reference)
    moved, ring = (sum(row[name] for row in rows) for name in ("moved_bytes", "ring_bytes"))
    stalled = sum(row["stall_seconds"] for row in rows[1:])
    agrees = None if difference is None else difference <= TOLERANCE
    traffic = f"Attention moved {moved / 1e6:,.0f} MB; ring attention would have moved"
    return {
        **{name: getattr(args, name) for name in ("mask", "solver", "kernel", "device", "seed")},
        "ranks": ranks,
        "losses": losses,
        "reference_losses": reference,
        "largest_difference": difference,
        "tolerance": TOLERANCE,
        "agrees": agrees,
        "moved_bytes": moved,
        "ring_bytes": ring,
        "steps": list(rows),
        "conclusion": [
            _agreement(ranks, difference, agrees),
            *([f"{traffic} {ring / 1e6:,.0f} MB."] if ring else []),
            f"Training waited {stalled:.2f} s for plans after the first step.",
        ],
    }


def _agreement(ranks: int, difference: float | None, agrees: bool | None) -> str:
    if difference is None:
        return "Losses were not compared with a run in one process."
    numbers = f"largest difference {difference:.1e}, tolerance {TOLERANCE:.0e}"
    said = "Losses agree" if agrees else "LOSSES DIFFER"
    return f"{said}: {ranks} rank{'s' * (ranks > 1)} and one process, {numbers}."


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """NaN if any loss is."""
    differences = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
