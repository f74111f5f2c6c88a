"""The runs of `dyncp train`: in one process, on virtual ranks, on processes, as one of these.

The processes get a folder in which they find the reference's losses and leave their results.
"""

import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dyncp.cli.launch import launch, threads_per_rank
from dyncp.cli.progress import Progress
from dyncp.cli.train_report import StepTable
from dyncp.train.config import TrainConfig

if TYPE_CHECKING:
    from dyncp.train.loop import StepResult

REFERENCE, RESULTS = "reference.json", "results.json"
TIMEOUT = timedelta(minutes=10)


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
    import torch
    import torch.distributed as dist

    from dyncp.train.loop import open_corpus, train_on_ranks

    torch.set_num_threads(threads_per_rank(int(os.environ["LOCAL_WORLD_SIZE"])))
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl", timeout=TIMEOUT
    )
    # torchrun stops its ranks by SIGTERM: the loader has a process to end.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        first = dist.get_rank() == 0
        table = (
            StepTable(config.steps, _reference(exchange), to_stderr=to_stderr) if first else None
        )
        results = _collect(train_on_ranks(config, open_corpus(config)), table)
    finally:
        dist.destroy_process_group()
    if first and exchange is not None:
        Path(exchange, RESULTS).write_text(json.dumps([asdict(result) for result in results]))
    return results if first else []


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
