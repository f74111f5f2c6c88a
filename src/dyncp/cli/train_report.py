"""What `dyncp train` prints: a table with a row per step, and the conclusion."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dyncp.cli.output import Progress

if TYPE_CHECKING:
    from dyncp.train.config import TrainConfig
    from dyncp.train.loop import StepResult

# Largest difference of a loss between the runs. Measured, as fp32 sums in another order: 1e-6 after
# 8 steps and 1e-5 after 100. (At 3e-3, where training is unstable, they grow to 5e-2 after 100.)
TOLERANCE = 1e-4

MEGABYTE = 1e6

HEADER = (
    " step  tokens  docs  longest    loss  one process  difference"
    "  moved MB  ring MB   saved  seconds"
)


class StepTable:
    """Prints results as they come; `reference` are the losses of the one-process run."""

    def __init__(self, steps: int, reference: Sequence[float] | None, *, to_stderr: bool) -> None:
        self._progress = Progress(sys.stderr if to_stderr else sys.stdout)
        self._steps, self._reference = steps, reference
        self._progress.say(HEADER)
        self._announce(1, "")

    def add(self, result: "StepResult") -> None:
        reference = None if self._reference is None else self._reference[result.step - 1]
        self._progress.say(format_row(result, reference))
        self._announce(result.step + 1, result.loader)

    def _announce(self, step: int, loader: str) -> None:
        if self._progress.in_place and step <= self._steps:  # elsewhere the rows are the progress
            self._progress.show(progress_line(step, self._steps, loader))


def progress_line(step: int, steps: int, loader: str) -> str:
    """What is done now, and how the loader keeps up; one line of a terminal."""
    line = f"{step:>5} of {steps} ..."
    return f"{line} {loader}"[: len(HEADER)] if loader else line


def format_row(result: "StepResult", reference: float | None) -> str:
    moved, ring = result.moved_bytes / MEGABYTE, result.ring_bytes / MEGABYTE
    compared = (
        f"{'-':>13}{'-':>12}"
        if reference is None
        else f"{reference:>13.4f}{abs(result.loss - reference):>12.1e}"
    )
    return (
        f"{result.step:>5}{result.tokens:>8,}{result.documents:>6}{result.longest:>9,}"
        f"{result.loss:>8.4f}{compared}{moved:>10,.1f}{ring:>9,.1f}"
        f"{_saved(result.moved_bytes, result.ring_bytes):>8}{result.seconds:>9.1f}"
    )


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """NaN if any loss is."""
    differences = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def summarise(
    config: "TrainConfig",
    ranks: int,
    results: Sequence["StepResult"],
    reference: Sequence[float] | None,
) -> dict[str, Any]:
    """Everything about the run, ready for JSON."""
    losses = [result.loss for result in results]
    difference = None if reference is None else largest_difference(losses, reference)
    return {
        "config": asdict(config) | {"tokens_per_batch": config.batch_tokens},
        "ranks": ranks,
        "solver": config.solver,
        "losses": losses,
        "reference_losses": None if reference is None else list(reference),
        "largest_difference": difference,
        "tolerance": TOLERANCE,
        "agrees": None if difference is None else difference <= TOLERANCE,
        "moved_bytes": sum(result.moved_bytes for result in results),
        "ring_bytes": sum(result.ring_bytes for result in results),
        "seconds": sum(result.seconds for result in results),
        "steps": [asdict(result) for result in results],
    }


def conclusion(summary: dict[str, Any]) -> list[str]:
    """The lines below the table."""
    return [_agreement(summary), *_traffic(summary), *_planning(summary)]


def _agreement(summary: dict[str, Any]) -> str:
    difference, ranks = summary["largest_difference"], summary["ranks"]
    if difference is None:
        return "Losses were not compared with a run in one process."
    numbers = f"largest difference {difference:.1e}, tolerance {summary['tolerance']:.0e}"
    if summary["agrees"]:
        return f"Losses agree: {_ranks(ranks)} and one process, {numbers}."
    return f"LOSSES DIFFER: {_ranks(ranks)} and one process, {numbers}."


def _traffic(summary: dict[str, Any]) -> list[str]:
    moved, ring = summary["moved_bytes"], summary["ring_bytes"]
    if not ring:
        return []
    return [
        f"Attention moved {moved / MEGABYTE:,.0f} MB; ring attention would have moved "
        f"{ring / MEGABYTE:,.0f} MB ({_saved(moved, ring)} saved)."
    ]


def _planning(summary: dict[str, Any]) -> list[str]:
    steps = summary["steps"]
    if not any(step["plan_seconds"] for step in steps):
        return []
    longest = max(step["plan_seconds"] for step in steps)
    stalled = sum(step["stall_seconds"] for step in steps[1:])
    solvers = ", ".join(sorted({step["planned_by"] for step in steps}))
    return [
        f"Plans took up to {longest:.2f} s each, in the background ({solvers}).",
        f"Training waited {stalled:.2f} s for them after the first step.",
    ]


def _saved(moved: int, ring: int) -> str:
    return f"{100 * (1 - moved / ring):.1f} %" if ring else "-"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
