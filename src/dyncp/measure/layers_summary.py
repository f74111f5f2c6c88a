"""The numbers of `bench layers`: of one rank, and over the ranks of a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dyncp.measure.spread_ranks import num_messages
from dyncp.measure.stack_cases import ATTENTIONS, NONE, OURS, PLAIN, RankCase
from dyncp.measure.steady import Kernels, Steady
from dyncp.measure.whole_documents import plain_attention

# What is summarised, and whether more is worse.
SUMMARISED = {
    "wall_seconds": True,
    "busy_share": False,
    "host_share": True,
    "kernels": True,
    "kernel_seconds": True,
    "wall_over_kernels": True,
    "wall_over_plain": True,
}


def describe_case(
    case: RankCase,
    device: torch.device,
    steady: Mapping[str, Steady | None],
    kernels: Mapping[str, Kernels | None],
    reasons: Mapping[str, str],
) -> dict[str, Any]:
    """One rank; the three mappings are by kind of attention."""
    plain = steady[PLAIN]
    names = {OURS: OURS, PLAIN: plain_attention(device), NONE: NONE}
    pairs = {OURS: case.pairs, PLAIN: case.documents.pairs, NONE: 0}
    return {
        "sample": case.sample,
        "mask": case.mask,
        "solver": case.part.solver,
        "rank": case.part.rank,
        "why": case.why,
        "tokens": case.rows,
        "messages": num_messages(case.part),
        "plain_documents": str(case.documents),
        "attention": {
            kind: {"implementation": names[kind], "pairs": pairs[kind], "reason": reasons[kind]}
            | describe_stack(steady[kind], kernels[kind], plain)
            for kind in ATTENTIONS
        },
    }


def describe_stack(
    steady: Steady | None, kernels: Kernels | None, plain: Steady | None
) -> dict[str, float | None]:
    """Seconds and shares of one iteration; None is what was not measured. The busy share is that of
    the unprofiled wall time in which the profiled kernels would have run."""
    wall = None if steady is None else steady.seconds
    return {
        "wall_seconds": wall,
        "mean_wall_seconds": None if steady is None else steady.mean_seconds,
        "host_seconds": None if steady is None else steady.host_seconds,
        "host_share": None if steady is None else _over(steady.host_seconds, wall),
        "busy_share": None if kernels is None else _over(kernels.busy_seconds, wall),
        "kernels": None if kernels is None else kernels.count,
        "kernel_seconds": None if kernels is None else kernels.seconds,
        "attention_kernel_seconds": None if kernels is None else kernels.attention_seconds,
        "wall_over_kernels": None if kernels is None else _over(wall, kernels.seconds),
        "wall_over_plain": None if plain is None else _over(wall, plain.seconds),
    }


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def summarise_ranks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Worst and mean over the ranks of every sample and mask, by kind of attention."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["sample"], row["mask"]), []).append(row)
    return [
        {
            "sample": sample,
            "mask": mask,
            "attention": {
                kind: _worst_and_mean([row["attention"][kind] for row in group])
                for kind in ATTENTIONS
            },
        }
        for (sample, mask), group in groups.items()
    ]


def _worst_and_mean(measured: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float] | None]:
    found: dict[str, dict[str, float] | None] = {}
    for column, more_is_worse in SUMMARISED.items():
        values = [one[column] for one in measured if one[column] is not None]
        worst = max if more_is_worse else min
        mean = float(np.mean(values)) if values else 0.0
        found[column] = {"worst": worst(values), "mean": mean} if values else None
    return found
