"""Shows that training under dyncp gives the same results as without; `make demo` runs it.

Trains the model of examples/train_llama.py from the same weights on the same documents, in fp32:

    4 ranks    train_llama.py on 4 processes, with a checkpoint half way
    1 rank     the same script on one process
    resumed    the same script on 2 processes, resumed from the checkpoint
    plain      Transformers in one process, without dyncp, one document after the other

and compares losses and gradient norms at every step. The exit code is 1 if they differ.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from dyncp import DCPExecutor, masks
from dyncp.integrations.transformers import attach
from examples.launch import launch
from examples.train import ring_bytes
from examples.train_llama import Texts, make_model, parse

RANKS, FEWER, CPU = 4, 2, torch.device("cpu")
TOLERANCE = 1e-4  # relative; fp32 sums in another order differ by about 1e-6
SCRIPT = str(Path(__file__).with_name("train_llama.py"))
HEADER = (
    f"{'loss':>32}{'on 4 ranks':>46}\n"
    " step docs pieces   plain  1 rank 4 ranks resumed  differ"
    " tokens/s imbalance moved MB ring MB stall"
)
NEXT = """
Next:
  examples/train_llama.py                  the script, to be copied (docs/transformers.md)
  dyncp train --mask lambda_shaped         another mask; --device cuda --virtual-ranks 4 on a GPU
  dyncp simulate --help                    is it worth it for your documents and your cluster?"""

Rows = dict[int, dict[str, Any]]  # by step


def compile_planner(args: argparse.Namespace) -> None:
    """Plans one batch, so that ranks find compiled code on disk."""
    print("compiling the planner (once; about half a minute) ...", flush=True)
    logging.getLogger("dyncp").setLevel(logging.ERROR)  # that it waits for the first plan
    attached, executor = attach(make_model(args, CPU)), DCPExecutor(virtual_ranks=RANKS)
    options = {"tokens_per_batch": args.tokens_per_batch, "virtual_ranks": RANKS}
    with attached.loader(Texts(args), masks.causal, executor=executor, **options) as loader:
        next(iter(loader))


def on_ranks(title: str, num_ranks: int, words: list[str]) -> Rows:
    """Runs train_llama.py and returns its log."""
    print(f"\n{title}", flush=True)
    with tempfile.TemporaryDirectory(prefix="dyncp-") as folder:
        log = Path(folder, "log")
        code = launch([SCRIPT, *words, "--log-file", str(log)], num_ranks)
        if code:
            raise SystemExit(f"demo: {SCRIPT} on {num_ranks} ranks: exit code {code}; see above")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {row["step"]: row for row in rows}


def plain(args: argparse.Namespace, steps: Rows) -> Rows:
    """Losses and gradient norms of the same steps, without dyncp."""
    print("\nplain: Transformers in one process, document by document", flush=True)
    texts, model = Texts(args), make_model(args, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    found = {}
    for number, step in steps.items():
        started, loss = perf_counter(), 0.0
        documents = [texts[place]["input_ids"][None] for place in step["documents"]]
        targets = sum(document.numel() - 1 for document in documents)
        for document in documents:
            part = model(input_ids=document, labels=document, num_items_in_batch=targets).loss
            part.backward()
            loss += part.item()
        norm = clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        rate = step["tokens"] / (perf_counter() - started)
        print(f"step {number:>4}  loss {loss:.6f}  norm {norm:.4f}  {rate:>7,.0f} tokens/s")
        found[number] = {"loss": loss, "norm": norm}
    return found


def ring_megabytes(row: dict[str, Any]) -> float:
    return ring_bytes(row["tokens"], RANKS, recomputed=True) / 1e6


def compare(expected: Rows, main: Rows, others: list[Rows]) -> float:
    """Prints the table and returns the largest relative difference of any run from the expected
    numbers; NaN if any is NaN."""
    print(f"\n{HEADER}")
    worst = 0.0
    for number, row in main.items():
        alone, runs = expected[number], [others[0].get(number), row, others[1].get(number)]
        parts = [run[name] / alone[name] - 1 for run in runs if run for name in ("loss", "norm")]
        differs = float(torch.tensor(parts).abs().max())
        worst = float(torch.tensor([worst, differs]).max())
        shown = "".join(f"{run['loss']:>8.5f}" if run else f"{'-':>8}" for run in (alone, *runs))
        print(
            f"{number:>5}{len(row['documents']):>5}{row['pieces']:>7}{shown}{differs:>8.0e}"
            f"{row['tokens'] / row['seconds']:>9,.0f}{row['imbalance']:>10.2f}"
            f"{row['moved_bytes'] / 1e6:>9.1f}{ring_megabytes(row):>8.1f}"
            f"{row['stall']:>6.2f}"
        )
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--max-length", type=int, default=3072, help="tokens of a document")
    parser.add_argument("--tokens-per-batch", type=int, default=8192)
    given = vars(parser.parse_args())
    words = [str(x) for name in given for x in (f"--{name.replace('_', '-')}", given[name])]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same everywhere: 4 processes on the CPU
    compile_planner(parse(words))
    half = given["steps"] // 2
    with tempfile.TemporaryDirectory(prefix="dyncp-") as folder:
        save = ["--checkpoint", folder, "--save-every", str(half)]
        many = on_ranks(f"{RANKS} ranks: train_llama.py", RANKS, [*words, *save])
        saved = str(Path(folder, f"step-{half}"))
        resumed = on_ranks(f"resumed on {FEWER} ranks", FEWER, [*words, "--resume", saved])
    one = on_ranks("1 rank: the same script", 1, words)
    worst = compare(plain(parse(words), many), many, [one, resumed])
    agrees = worst <= TOLERANCE  # NaN does not
    verdict = "agree" if agrees else "DIFFER"
    print(f"\nLosses and gradient norms {verdict}: largest relative difference {worst:.0e}.")
    moved = sum(row["moved_bytes"] for row in many.values()) / 1e6
    ring = sum(map(ring_megabytes, many.values()))
    print(f"Attention moved {moved:,.0f} MB; ring attention would have moved {ring:,.0f} MB.")
    print(NEXT)
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
