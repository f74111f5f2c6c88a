"""What follows from the measurements of an optimiser step: which multiple of the right gradients an
optimiser gets, and why.

    contributions   what backward computed on every rank, from losses multiplied by `factor`
    reduced         gradients when backward has ended, or after sum_gradients: `reduced` times the
                    sum of the contributions over ranks
    final           gradients that the optimiser gets: `final` times that sum. Clipping makes them
                    smaller, so `final` alone tells nothing if every step is clipped

`factor * reduced` must be 1. Only multiples that mistakes lead to are errors: users may multiply
their losses by weights.
"""

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from dyncp.gradients.events import MicroBatch

LOOKS = 4  # of which the first one compares nothing
SAME = 1e-2  # relative: sums in 16 bits; what is wrong is at least a factor of 1.25
CLOSE = 1e-3  # relative: an average or a double sum that something else may scale
STRAY = 0.1  # relative: sums in 16 bits differ by less
ABOUT = "see docs/training.md, loss and gradients"


class Measured(NamedTuple):
    """Gradients relative to the sum of contributions."""

    ratio: float = 1.0
    stray: float = 0.0  # distance from that multiple, relative to it

    @property
    def is_multiple(self) -> bool:
        return self.stray <= STRAY

    @property
    def is_sum(self) -> bool:
        return abs(self.ratio - 1) <= SAME and self.is_multiple


class Scales(NamedTuple):
    """The measurements of a step. `factor` is None if no loss was seen."""

    reduced: Measured
    final: Measured
    factor: float | None
    scaled: float  # the scale that the optimiser itself takes out, as fused ones do
    is_direct: bool  # at most one change between `reduced` and `final`: clipping

    @property
    def early(self) -> float:
        return self.reduced.ratio * (self.factor or 1.0)

    @property
    def late(self) -> float:
        return self.final.ratio * (self.factor or 1.0) / self.scaled

    @property
    def is_clipped(self) -> bool:
        """Whether gradients are as reduced, or at most clipped. Who multiplies them by hand, or
        sums them, makes them larger or right."""
        smaller = self.late <= self.early * (1 + CLOSE)
        return self.is_direct and smaller and not is_close(self.late, 1.0)


def suspects(sizes: Iterable[float], batches: int, updates: int) -> set[float]:
    """Multiples that mistakes lead to, from numbers of ranks and of accumulated batches. Several
    updates of a loader may be averaged."""
    ranks = {1.0, *sizes}
    by_ranks = ranks | {1 / size for size in ranks}
    found = {a * b for a, b in product(by_ranks, {1.0, 1 / max(1, batches)})}
    return found - {1.0, 1 / max(1, updates)}


def multiple_error(history: list[Scales], wrong: set[float]) -> ValueError | None:
    """An error if the gradients of the latest step are one of the `wrong` multiples."""
    last, early = history[-1], history[-1].early
    for multiple in wrong:
        if last.is_clipped and last.reduced.is_multiple and is_close(early, multiple):
            return _multiple_error(multiple, last.factor, last.reduced)
        always = all(is_close(scales.late, multiple) for scales in history)
        if len(history) == LOOKS - 1 and last.final.is_multiple and always:
            return _multiple_error(multiple, last.factor, last.final)
    return None


def is_close(a: float, b: float) -> bool:
    return abs(a / b - 1) < CLOSE


def _multiple_error(multiple: float, factor: float | None, found: Measured) -> ValueError:
    losses = "" if factor in (None, 1.0) else f", from losses that were multiplied by {factor:.4g}"
    if found.is_sum:
        cure = (
            "use losses as they are returned: num_items_in_batch counts the targets of all ranks "
            "and accumulated batches of the step, so do not divide or multiply by their numbers"
        )
    else:
        cure = (
            "DDP or FSDP averaged them, or they were summed twice; call sum_gradients(model) once "
            "per optimiser step, after the last backward, whatever wraps the model, and do not "
            "multiply losses or gradients by numbers of ranks"
        )
    return ValueError(
        f"the gradients of this optimiser are {multiple:.4g} times those of the step's loss, and "
        f"{found.ratio:.4g} times the sum over ranks of what backward computed{losses}: {cure}. If "
        f"this factor is meant, make DCPExecutor(check_gradients=False); {ABOUT}"
    )


def sum_error(ratio: float) -> ValueError:
    return ValueError(
        f"the gradients that sum_gradients made are {ratio:.4g} times the sum of what "
        "backward computed on all ranks with different tokens. Either its group leaves "
        "out some of these ranks: call sum_gradients(model, mesh). Or the gradients "
        "had something else in them: those of the step before (call optimizer."
        "zero_grad()), or a sum over ranks by a communication hook of DDP or your own "
        f"all-reduce. Clip them afterwards; {ABOUT}"
    )


def factors_error(least: float, most: float) -> ValueError:
    return ValueError(
        f"ranks multiplied their losses by different numbers before backward, {least:.4g} to "
        f"{most:.4g}: use losses as they are returned. They are already divided by the targets of "
        f"all ranks, and their sum is the mean over these; {ABOUT}"
    )


def idle_error() -> ValueError:
    return ValueError(
        "attention ran backward, but the parameters of this optimiser have no gradients: they are "
        "no longer those of the model. Make the optimiser after fully_shard, after load_state_dict("
        f"assign=True) and after adapters are added, which replace parameters; {ABOUT}"
    )


def late_error() -> ValueError:
    return ValueError(
        "backward added to gradients that sum_gradients had summed already: call it once per "
        "optimiser step, after the last micro-batch, and optimizer.zero_grad() before the next "
        f"step; {ABOUT}"
    )


def update_error(batches: set[MicroBatch], scales: Scales) -> ValueError | None:
    """An error if the batches of an optimiser step are not those that the loader planned for one.
    Means of several updates may be averaged by hand."""
    for loader in {batch.loader for batch in batches}:
        own = [batch for batch in batches if batch.loader == loader]
        updates = {batch.update for batch in own}
        if {batch.update for batch in own if batch.completes} != updates:
            return ValueError(
                "the optimiser steps before the loader's optimiser step is complete, whose targets "
                "all losses are divided by: step when loader.completes_update is true, or make the "
                f"loader with the accumulation_steps of your loop; {ABOUT}"
            )
        if len(updates) > 1 and scales.factor is not None and is_close(scales.early, 1.0):
            return ValueError(
                f"the optimiser steps with the sum of {len(updates)} of the loader's optimiser "
                "steps, each divided by its own targets: make the loader with accumulation_steps="
                f"{len(own)}, and step when loader.completes_update is true; {ABOUT}"
            )
    return None
