"""Kernels beside each other: masks × lengths × implementations on one device."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dyncp.blocks import AttentionShape
from dyncp.cost import BACKWARD_FLOPS
from dyncp.measure.baselines import BASELINES
from dyncp.measure.dense import Results, dense_attention, relative_errors
from dyncp.measure.implementation import (
    Attend,
    Unavailable,
    backward,
    first_line,
    forward,
    results_of,
)
from dyncp.measure.inputs import Inputs, make_inputs
from dyncp.measure.kernel_seconds import attention_seconds, kernel_seconds
from dyncp.measure.mask_cases import MaskCase, mask_case
from dyncp.measure.ours import KernelChoice, ours
from dyncp.measure.timing import Repeats, Run, time_call

logger = logging.getLogger(__name__)

# fp64 scores of more tokens take too long.
MOST_CHECKED_TOKENS = 16384
LISTED_KERNELS = 6


@dataclass(frozen=True, slots=True)
class KernelsSetting:
    """What is measured. `check` is which lengths are compared with dense attention in fp64: the
    smallest, "all" (of at most 16,384 tokens) or "none"."""

    masks: tuple[str, ...]
    lengths: tuple[int, ...]
    kernels: tuple[KernelChoice, ...]
    baselines: tuple[str, ...]
    shape: AttentionShape
    device: torch.device
    repeats: Repeats = field(default_factory=Repeats)
    check: str = "smallest"

    def __post_init__(self) -> None:
        if self.check not in ("smallest", "all", "none"):
            raise ValueError(f"check is {self.check!r}; choose one of smallest, all, none")
        for name in self.baselines:
            if name not in BASELINES:
                raise ValueError(f"baseline is {name!r}; choose from {', '.join(BASELINES)}")
        for mask in self.masks:
            mask_case(mask, 1)

    def checks(self, tokens: int) -> bool:
        if self.check == "none" or tokens > MOST_CHECKED_TOKENS:
            return False
        return self.check == "all" or tokens == min(self.lengths)


@dataclass(frozen=True, slots=True)
class Measured:
    """One direction: seconds on the device of the whole call and of its attention kernels (None
    without a GPU), seconds on the host, and FLOP/s of the allowed pairs in the whole call.
    `kernels` has the seconds of its longest kernels by name."""

    seconds: float
    kernel_seconds: float | None
    host_seconds: float
    flops: float
    kernels: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One implementation on one mask and length; `reason` says why it could not run."""

    mask: str
    tokens: int
    pairs: int
    implementation: str
    forward: Measured | None = None
    backward: Measured | None = None
    errors: dict[str, float] | None = None
    reason: str = ""


def bench_kernels(
    setting: KernelsSetting, tell: Callable[[str], None] = lambda _: None
) -> Iterator[KernelRow]:
    """One row per mask, length and implementation, ours first. `tell` hears what is done now."""
    for mask in setting.masks:
        for tokens in setting.lengths:
            yield from _bench_case(mask_case(mask, tokens), setting, tell)


def _bench_case(
    case: MaskCase, setting: KernelsSetting, tell: Callable[[str], None]
) -> Iterator[KernelRow]:
    inputs = make_inputs(case.tokens, setting.shape, setting.device)
    expected = None
    if setting.checks(case.tokens):
        tell(f"{case.name}, {case.tokens:,} tokens: dense attention in fp64 ...")
        expected = dense_attention(case.batch, inputs)
    for name, build in _implementations(case, setting):
        tell(f"{case.name}, {case.tokens:,} tokens: {name} ...")
        yield _bench_one(case, name, build, inputs, expected, setting)


def _implementations(
    case: MaskCase, setting: KernelsSetting
) -> Iterator[tuple[str, Callable[[], Attend]]]:
    shape, device = setting.shape, setting.device
    for choice in setting.kernels:
        yield str(choice), partial(ours, case.batch, shape, choice, device)
    for name in setting.baselines:
        yield name, partial(BASELINES[name], case, shape, device)


def _bench_one(
    case: MaskCase,
    name: str,
    build: Callable[[], Attend],
    inputs: Inputs,
    expected: Results | None,
    setting: KernelsSetting,
) -> KernelRow:
    row: dict[str, Any] = {
        "mask": case.name,
        "tokens": case.tokens,
        "pairs": case.num_pairs,
        "implementation": name,
    }
    try:
        return KernelRow(**row, **_measure(case, build(), inputs, expected, setting))
    except Unavailable as reason:
        return KernelRow(**row, reason=str(reason))
    except Exception as error:  # others' kernels fail in their own ways; the rest goes on
        if name not in setting.baselines:
            raise
        logger.debug("%s failed", name, exc_info=True)
        return KernelRow(**row, reason=first_line(error))


def _measure(
    case: MaskCase,
    attend: Attend,
    inputs: Inputs,
    expected: Results | None,
    setting: KernelsSetting,
) -> dict[str, Any]:
    flops = 4.0 * case.num_pairs * setting.shape.head_dim * setting.shape.q_heads
    run = forward(attend, inputs)
    found: dict[str, Any] = {"forward": _direction(run, flops, setting)}
    found["backward"] = _direction(backward(run(), inputs), BACKWARD_FLOPS * flops, setting)
    if expected is not None:
        found["errors"] = relative_errors(results_of(attend, inputs), expected)
    return found


def _direction(run: Run, flops: float, setting: KernelsSetting) -> Measured:
    timed = time_call(run, setting.device, setting.repeats)
    by_name = kernel_seconds(run, setting.device)
    longest = dict(list((by_name or {}).items())[:LISTED_KERNELS])
    bare = attention_seconds(by_name)
    return Measured(timed.seconds, bare, timed.host_seconds, flops / timed.seconds, longest)


def ratios_to(
    rows: Sequence[KernelRow], other: str
) -> dict[tuple[str, int, str], tuple[float, ...]]:
    """FLOP/s of every implementation over those of `other`, forward and backward, by mask, tokens
    and implementation; only where both ran."""
    base = {(row.mask, row.tokens): row for row in rows if row.implementation == other}
    found: dict[tuple[str, int, str], tuple[float, ...]] = {}
    for row in rows:
        theirs = base.get((row.mask, row.tokens))
        if theirs is None or theirs.forward is None or row.forward is None:
            continue
        assert theirs.backward is not None
        assert row.backward is not None
        found[row.mask, row.tokens, row.implementation] = (
            row.forward.flops / theirs.forward.flops,
            row.backward.flops / theirs.backward.flops,
        )
    return found
