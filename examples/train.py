"""`dyncp train`: trains the small Llama of train_llama.py in one process, then on ranks under
dyncp, with a mask, kernel and device of your choice, and compares their losses.

Both start from the same weights and see the same batches. The one process runs Transformers' own
attention, document by document; nothing but its batches comes from dyncp.
"""

import json
import math
import signal
import sys
import sysconfig
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from dyncp import (
    DCPDataLoader,
    DCPExecutor,
    Plan,
    PlannerConfig,
    RankPlan,
    masks,
    next_token_loss,
    sum_gradients,
    sum_over_ranks,
)
from dyncp.calibrate import open_world, under_torchrun
from dyncp.checks import whole_number
from dyncp.cli.arguments import Progress, option
from dyncp.integrations.transformers import attach
from dyncp.kernels import choose_kernel
from examples.launch import launch
from examples.train_llama import SMALL, make_model

RANKS, DEVICES = 4, ("cpu", "cuda")
HEAD_DIM = SMALL["hidden_size"] // SMALL["num_attention_heads"]
# K and V of one token in all layers.
KV_VALUES = 2 * SMALL["num_hidden_layers"] * SMALL["num_key_value_heads"] * HEAD_DIM
LEARNING_RATE = 2e-3
DISAGREEMENT = 1
# Largest allowed difference of a loss. Another order of fp32 sums gives 1e-6 after 8 steps.
TOLERANCE = 1e-4
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
EXAMPLES = (
    "dyncp train",
    "dyncp train --ranks 2 --steps 3 --mask sliding_window:window=1024",
    "dyncp train --virtual-ranks 4 --device cuda",
    "torchrun --nproc-per-node 4 -m dyncp train --steps 5",
)

Row = dict[str, Any]  # facts about one optimiser step of all ranks
Losses = Sequence[float]


def add_options(parser: ArgumentParser) -> None:
    ranks = parser.add_mutually_exclusive_group()
    option(ranks, "--ranks", f"processes to train on (default {RANKS})", type=int)
    option(ranks, "--virtual-ranks", "N ranks inside one process instead", type=int, metavar="N")
    option(parser, "--steps", "optimiser steps", 6)
    option(parser, "--mask", "NAME[:key=value,...]; `dyncp masks` lists the names", "causal")
    option(parser, "--max-length", "tokens at which documents are cut", 4096)
    option(parser, "--solver", "solver that places blocks and tiles", PlannerConfig().solver)
    option(parser, "--kernel", "attention kernel", "auto")
    option(parser, "--device", "cpu or cuda", "cpu")
    option(parser, "--seed", "random seed of weights, order of documents and solver", 0)
    tokens = "tokens of a batch over all ranks (default: twice --max-length)"
    option(parser, "--tokens-per-batch", tokens, type=int)
    option(parser, "--corpus", "folder of text files (default: Python's standard library)")
    parser.add_argument("--no-reference", action="store_true", help="skip the run in one process")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout; the table goes to stderr"
    )
    # For the processes that this command starts: a file with the losses of one process.
    parser.add_argument("--reference", type=Path, help=SUPPRESS)


def run(args: Namespace) -> int:
    _check(args)
    if under_torchrun():
        return _run_as_rank(args)
    ranks = next((n for n in (args.ranks, args.virtual_ranks) if n is not None), RANKS)
    _check_hardware(args, processes=1 if args.virtual_ranks else ranks)
    reference = None if args.no_reference else _losses_of_one_process(args)
    if args.virtual_ranks or ranks == 1:
        return compare(args, ranks, train_on_ranks(args, ranks), reference)
    progress = Progress()
    progress.say(f"starting {ranks} processes ...")
    with TemporaryDirectory(prefix="dyncp-") as folder:
        path = Path(folder, "reference.json")
        path.write_text(json.dumps(reference))
        code = launch(["-m", "dyncp", *args.words, "--reference", str(path)], ranks)
    if code:
        progress.say(f"dyncp: error: the ranks ended with exit code {code}; see above")
    return code


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


def _check_hardware(args: Namespace, processes: int) -> None:
    """Raises ValueError if `processes` ranks cannot use this kernel or device here."""
    if args.device == "cuda" and torch.cuda.device_count() < processes:
        raise ValueError(
            f"--device is cuda, for one GPU per process; torch sees {torch.cuda.device_count()} "
            f"here, and {processes} are needed (--virtual-ranks runs all ranks on one)"
        )
    choose_kernel(args.kernel, torch.device(args.device))


def _losses_of_one_process(args: Namespace) -> list[float]:
    progress, losses = Progress(), list[float]()
    progress.show(f"one process, plain Transformers: step 1 of {args.steps}")
    for row in train_plain(args):
        losses.append(row["loss"])
        done = f"loss {row['loss']:.4f}, {row['seconds']:.1f} s"
        progress.show(f"one process: step {row['step']} of {args.steps} done ({done})")
    progress.clear()
    return losses


def _run_as_rank(args: Namespace) -> int:
    """Trains as one of torchrun's ranks."""
    with open_world(args.device) as world:
        if args.virtual_ranks or args.ranks not in (None, world.num_ranks):
            raise ValueError(
                f"torchrun started {world.num_ranks} processes, which are the ranks; leave --ranks "
                "and --virtual-ranks out, or start without torchrun"
            )
        # torchrun stops its ranks by SIGTERM, and the loader must end its planning process.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        reference = None if args.reference is None else json.loads(args.reference.read_text())
        rows = train_on_ranks(args)
        return compare(args, world.num_ranks, rows, reference, quiet=not world.first)


def compare(
    args: Namespace,
    ranks: int,
    rows: Iterable[Row],
    reference: Losses | None,
    *,
    quiet: bool = False,
) -> int:
    """Prints rows as they arrive, then whether their losses agree with those of one process.
    `quiet`, for all ranks but the first, prints nothing. Returns the exit code."""
    stream, found = sys.stderr if args.json else sys.stdout, list[Row]()
    for row in rows:
        found.append(row)
        if not quiet:
            head = f"{HEADER}\n" if len(found) == 1 else ""
            print(f"{head}{_line(row, reference)}", file=stream, flush=True)
    if quiet:
        return 0
    summary = _summarise(args, ranks, found, reference)
    print("", *summary["conclusion"], "", NEXT, sep="\n", file=stream, flush=True)
    if args.json:
        print(json.dumps(summary))
    if summary["agrees"] is not False:
        return 0
    print(f"dyncp: error: {summary['conclusion'][0]}", file=sys.stderr)
    return DISAGREEMENT


def _line(row: Row, reference: Losses | None) -> str:
    compared = f"{'-':>13}{'-':>12}"
    if reference is not None:
        alone = reference[row["step"] - 1]
        compared = f"{alone:>13.4f}{abs(row['loss'] - alone):>12.1e}"
    return (
        f"{row['step']:>5}{row['tokens']:>8,}{row['documents']:>6}{row['longest']:>9,}"
        f"{row['loss']:>8.4f}{compared}{row['moved_bytes'] / 1e6:>10,.1f}"
        f"{row['ring_bytes'] / 1e6:>9,.1f}{row['compute_imbalance']:>11.2f}{row['seconds']:>9.1f}"
    )


def _summarise(
    args: Namespace, ranks: int, rows: Sequence[Row], reference: Losses | None
) -> dict[str, Any]:
    """The JSON object."""
    losses = [row["loss"] for row in rows]
    moved, ring = (sum(row[name] for row in rows) for name in ("moved_bytes", "ring_bytes"))
    difference, agrees, said = None, None, "Losses were not compared with a run in one process."
    if reference is not None:
        apart = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
        difference = math.nan if any(map(math.isnan, apart)) else max(apart)
        agrees = difference <= TOLERANCE  # False for NaN
        said = (
            f"{'Losses agree' if agrees else 'LOSSES DIFFER'}: {ranks} rank{'s' * (ranks > 1)} and "
            f"one process, largest difference {difference:.1e}, tolerance {TOLERANCE:.0e}."
        )
    traffic = f"Attention moved {moved / 1e6:,.0f} MB; ring attention would have moved"
    stalled = sum(row["stall_seconds"] for row in rows[1:])
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
            said,
            *([f"{traffic} {ring / 1e6:,.0f} MB."] if ring else []),
            f"Training waited {stalled:.2f} s for plans after the first step.",
        ],
    }


class TextCorpus:
    """Text files in the order of their paths, a token per byte: samples {"input_ids": tokens}.

    Without a folder, these are the modules of Python's standard library, whose lengths have a
    long tail. Hidden files and files that are not text are left out.
    """

    def __init__(self, folder: str | None, max_length: int) -> None:
        self.max_length = max_length
        root = Path(folder or sysconfig.get_path("stdlib"))
        if not root.is_dir():
            raise ValueError(f"--corpus is {folder!r}, which is not a folder")
        found = root.rglob("[!.]*") if folder else root.glob("*.py")
        visible = (f for f in found if not any(x[0] == "." for x in f.relative_to(root).parts))
        self.files = sorted(file for file in visible if file.is_file() and _is_text(file))
        if not self.files:
            raise ValueError(f"--corpus is {folder!r}, which has no text files of 2 bytes or more")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        with self.files[index].open("rb") as file:
            return {"input_ids": torch.tensor(list(file.read(self.max_length)))}


def _is_text(path: Path) -> bool:
    """Whether a file has a byte to read and one to predict, and no zero byte near its start."""
    with path.open("rb") as file:
        start = file.read(1024)
    return len(start) > 1 and b"\0" not in start


def train_plain(args: Namespace) -> Iterator[Row]:
    """Trains in one process, without dyncp's attention."""
    corpus, model, mask_fn = *_start(args), masks.by_name(args.mask)
    loader = DCPDataLoader(corpus, mask_fn, model=model, virtual_ranks=1, **_options(args))

    def loss_of(data: dict[str, Tensor], plan: Plan | RankPlan) -> Tensor:
        lengths = _part(plan).lengths.tolist()
        documents = torch.split(data["input_ids"], lengths, dim=1)
        positions = torch.split(data["position_ids"], lengths, dim=1)
        logits = []
        for tokens, places in zip(documents, positions, strict=True):
            bias = _bias(mask_fn({"input_ids": tokens[0].cpu()}), tokens.device)
            given = {"input_ids": tokens, "position_ids": places, "attention_mask": bias}
            logits.append(model(**given, use_cache=False).logits)
        return next_token_loss(torch.cat(logits, dim=1), data)

    return _train(args, model, loader, loss_of, lambda: 0)


def train_on_ranks(args: Namespace, virtual_ranks: int | None = None) -> Iterator[Row]:
    """Trains under dyncp, on the ranks of the process group or on `virtual_ranks` in this process.
    All ranks of the group iterate it together and get the same rows."""
    corpus, model = _start(args)
    attached = attach(model)
    executor = DCPExecutor(virtual_ranks=virtual_ranks, kernel=args.kernel, device=model.device)
    if executor.device.type == "cuda":
        executor.warm_up(attached.shape())
    ranks = {"virtual_ranks": virtual_ranks, "executor": executor}
    loader = attached.loader(corpus, masks.by_name(args.mask), **ranks, **_options(args))

    def loss_of(data: dict[str, Tensor], plan: Plan | RankPlan) -> Tensor:
        loss: Tensor = model(**data, dyncp_step=executor.prepare(plan)).loss
        return loss

    return _train(args, model, loader, loss_of, lambda: executor.transport.bytes_sent)


def _start(args: Namespace) -> tuple[TextCorpus, Any]:
    corpus = TextCorpus(args.corpus, args.max_length)
    cpu = args.device == "cpu"
    device = torch.device("cpu") if cpu else torch.device("cuda", torch.cuda.current_device())
    return corpus, make_model(Namespace(model=None, seed=args.seed), device)


def _options(args: Namespace) -> dict[str, Any]:
    return {
        "tokens_per_batch": args.tokens_per_batch or 2 * args.max_length,
        "shuffle": True,
        "seed": args.seed,
        "planner": PlannerConfig(args.solver, seed=args.seed),
    }


def _bias(mask: masks.Mask, device: torch.device) -> Tensor | None:
    """The mask that Transformers adds to the scores; None for its own causal mask."""
    if mask == masks.causal(mask.length):
        return None
    allowed = torch.from_numpy(mask.dense()).to(device)
    return torch.zeros(allowed.shape, device=device).masked_fill(~allowed, -torch.inf)[None, None]


def _train(
    args: Namespace,
    model: Any,
    loader: DCPDataLoader,
    loss_of: Callable[[dict[str, Tensor], Plan | RankPlan], Tensor],
    sent: Callable[[], int],
) -> Iterator[Row]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with loader:
        batches = chain.from_iterable(repeat(loader))
        for number in range(1, args.steps + 1):
            started, before = perf_counter(), sent()
            data, plan = next(batches)
            data = {name: value.to(model.device) for name, value in data.items()}
            loss = loss_of(data, plan)
            loss.backward()  # type: ignore[no-untyped-call]
            sum_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            own = torch.tensor([loss.item(), sent() - before], dtype=torch.float64)
            total, moved = sum_over_ranks(own).tolist()
            row = {"step": number, "loss": total, "moved_bytes": int(moved)}
            yield row | _facts(_part(plan), loader) | {"seconds": perf_counter() - started}


def _facts(plan: RankPlan, loader: DCPDataLoader) -> Row:
    last, tokens = loader.metrics.last, int(plan.lengths.sum())
    assert last is not None
    return {
        "tokens": tokens,
        "documents": len(plan.lengths),
        "longest": int(plan.lengths.max()),
        "ring_bytes": ring_bytes(tokens, plan.num_ranks),
        "compute_imbalance": plan.balance.compute_max_over_mean,
        "token_imbalance": plan.balance.tokens_max_over_mean,
        "stall_seconds": last.stall_seconds,
        "plan_seconds": last.plan_seconds,
        "planned_by": last.solver,
    }


def _part(plan: Plan | RankPlan) -> RankPlan:
    return plan.parts[0] if isinstance(plan, Plan) else plan


def ring_bytes(tokens: int, num_ranks: int, *, recomputed: bool = False) -> int:
    """Bytes that ring attention moves in a step: K and V of all tokens visit all other ranks in
    forward, again if forward is `recomputed`, and in backward together with their gradients."""
    passes = 4 if recomputed else 3
    return passes * (num_ranks - 1) * tokens * KV_VALUES * torch.float32.itemsize
