"""`dyncp bench kernels`: compares dyncp's kernels with torch's and flash-attn-4's on masks and
lengths."""

import logging
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.baselines import BASELINES, MaskCase, dense_attention, mask_case
from dyncp.blocks import AttentionShape, Direction
from dyncp.calibrate import Repeats
from dyncp.calibrate.calls import (
    MASKS,
    Attend,
    Inputs,
    OutAndGrads,
    Run,
    Unavailable,
    both_directions,
    executor_options,
    find_mask,
    make_inputs,
    one_rank_attention,
    relative_errors,
    results_of,
)
from dyncp.calibrate.diagnosis import first_line
from dyncp.calibrate.timing import profiled_kernels, time_call
from dyncp.calibrate.world import device_text, open_device
from dyncp.cli.arguments import (
    Progress,
    add_measuring_options,
    add_shape_options,
    check_outputs,
    comma_separated,
    option,
    positive_integers,
    shape_of,
    shape_text,
    show,
)
from dyncp.cost import BACKWARD_FLOPS

logger = logging.getLogger(__name__)

LENGTHS = {"cpu": "1024,2048", "cuda": "16384,32768"}
KERNELS = {"cpu": "cpu", "cuda": "flash4:fast,flash4:deterministic,triton"}
# Dense attention in fp64 takes too long for more tokens.
MOST_CHECKED_TOKENS = 16384
# Kernel durations are averaged over this many calls; so many kernels are listed by name.
PROFILED, LISTED_KERNELS = 3, 6
UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"))
OTHERS = {"flex": "× flex", "flash_attn_4": "× flash-attn-4"}

EXAMPLES = (
    "dyncp bench kernels",
    "dyncp bench kernels --masks causal,lambda_shaped --lengths 4096 --check all --json",
)


def add_options(parser: ArgumentParser) -> None:
    option(parser, "--masks", "masks, separated by commas", ",".join(MASKS))
    text = f"tokens, as in 4096,8192 (default {LENGTHS['cuda']}, on CPUs {LENGTHS['cpu']})"
    option(parser, "--lengths", text)
    text = "dyncp's kernels: NAME, NAME:fast or NAME:deterministic "
    option(parser, "--kernels", text + f"(default {KERNELS['cuda']}, on CPUs {KERNELS['cpu']})")
    text = "other implementations, measured if they can run; '' for none"
    option(parser, "--baselines", text, ",".join(BASELINES))
    add_shape_options(parser)
    text = "lengths compared with dense attention in fp64: smallest, all (up to 16,384) or none"
    option(parser, "--check", text, "smallest")
    add_measuring_options(parser, 7)


@dataclass(frozen=True, slots=True)
class KernelsSetting:
    """What is measured. `check` says which lengths are compared with dense attention in fp64: the
    "smallest", "all" (up to 16,384 tokens) or "none"."""

    masks: tuple[str, ...]
    lengths: tuple[int, ...]
    kernels: tuple[str, ...]
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
            find_mask(mask)
        for kernel in self.kernels:
            executor_options(kernel)

    def checks(self, tokens: int) -> bool:
        if self.check == "none" or tokens > MOST_CHECKED_TOKENS:
            return False
        return self.check == "all" or tokens == min(self.lengths)


@dataclass(frozen=True, slots=True)
class Measured:
    """One direction of a call: device seconds of the whole call and of its attention kernels (None
    without a GPU), host seconds, and FLOP/s of the allowed pairs over the whole call. `kernels` has
    the seconds of the longest kernels by name."""

    seconds: float
    kernel_seconds: float | None
    host_seconds: float
    flops: float
    kernels: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One implementation on one mask and length; `reason` says why it could not run, if so."""

    mask: str
    tokens: int
    pairs: int
    implementation: str
    forward: Measured | None = None
    backward: Measured | None = None
    errors: dict[str, float] | None = None
    reason: str = ""


def run(args: Namespace) -> int:
    check_outputs(raw=args.raw)
    device = open_device(args.device)
    setting = _setting(args, device)
    progress = Progress()
    rows = list(bench_kernels(setting, progress.show))
    progress.clear()
    about = {"device": device_text(device), "shape": asdict(setting.shape)}
    head = f"{device_text(device)}; {shape_text(setting.shape)}; median of {args.repeats}\n"
    show(args, about | {"rows": [asdict(row) for row in rows]}, [head, *draw_kernels(rows)])
    return 0


def _setting(args: Namespace, device: torch.device) -> KernelsSetting:
    lengths = LENGTHS[device.type] if args.lengths is None else args.lengths
    kernels = KERNELS[device.type] if args.kernels is None else args.kernels
    return KernelsSetting(
        masks=comma_separated(args.masks, "--masks"),
        lengths=positive_integers(lengths, "--lengths"),
        kernels=comma_separated(kernels, "--kernels"),
        baselines=comma_separated(args.baselines),
        shape=shape_of(args, device.type),
        device=device,
        repeats=Repeats(timed=args.repeats),
        check=args.check,
    )


def bench_kernels(
    setting: KernelsSetting, tell: Callable[[str], None] = lambda _: None
) -> Iterator[KernelRow]:
    """One row per mask, length and implementation, ours first. `tell` is called with progress
    texts."""
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
    for kernel in setting.kernels:
        yield kernel, partial(one_rank_attention, case.batch, shape, kernel, device)
    for name in setting.baselines:
        yield name, partial(BASELINES[name], case, device)


def _bench_one(
    case: MaskCase,
    name: str,
    build: Callable[[], Attend],
    inputs: Inputs,
    expected: OutAndGrads | None,
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
    except Exception as error:  # other implementations may fail in any way; the rest still runs
        if name not in setting.baselines:
            raise
        logger.debug("%s failed", name, exc_info=True)
        return KernelRow(**row, reason=first_line(error))


def _measure(
    case: MaskCase,
    attend: Attend,
    inputs: Inputs,
    expected: OutAndGrads | None,
    setting: KernelsSetting,
) -> dict[str, Any]:
    flops = 4.0 * case.num_pairs * setting.shape.head_dim * setting.shape.q_heads
    runs = both_directions(attend, inputs)
    found: dict[str, Any] = {
        "forward": _direction(runs[Direction.FORWARD], flops, setting),
        "backward": _direction(runs[Direction.BACKWARD], BACKWARD_FLOPS * flops, setting),
    }
    if expected is not None:
        found["errors"] = relative_errors(results_of(attend, inputs), expected)
    return found


def _direction(run: Run, flops: float, setting: KernelsSetting) -> Measured:
    timed = time_call(run, setting.device, setting.repeats)
    attention, longest = None, dict[str, float]()
    if setting.device.type == "cuda":
        attention, longest = profile(run, setting.device)
    return Measured(timed.seconds, attention, timed.host_seconds, flops / timed.seconds, longest)


def profile(run: Run, device: torch.device) -> tuple[float, dict[str, float]]:
    """Seconds per call of the attention kernels, and of the longest kernels by name."""
    kernels = profiled_kernels(lambda: [run() for _ in range(PROFILED)], device)
    by_name: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_name[kernel.name] += kernel.seconds / PROFILED
    longest = sorted(by_name.items(), key=lambda entry: -entry[1])[:LISTED_KERNELS]
    return sum(k.seconds for k in kernels if k.is_attention) / PROFILED, dict(longest)


def draw_kernels(rows: Sequence[KernelRow]) -> Iterator[str]:
    """Every column has forward / backward; the lines below say what could not run, and why."""
    ran = [row for row in rows if row.forward is not None]
    size, unit = _unit(ran)
    shown = [name for name in OTHERS if any(row.implementation == name for row in ran)]
    base = {(row.mask, row.tokens, row.implementation): row for row in ran}
    names = [unit, *(OTHERS[name] for name in shown), "call / kernel", "host µs", "error out, grad"]
    yield f"{'':<46}" + "".join(f"{name:^18}" for name in names)
    for row in ran:
        others = [base.get((row.mask, row.tokens, name)) for name in shown]
        cells = [_speed(row, size), *(_pair(_ratios(row, other), ".2f") for other in others)]
        cells += [_pair(_overheads(row), ".2f"), _host(row), _errors(row)]
        label = f"{row.mask:<17}{row.tokens:>8,}  {row.implementation:<19}"
        yield label + "".join(f"{cell:^18}" for cell in cells)
    yield from _reasons(rows)


def _unit(rows: Sequence[KernelRow]) -> tuple[float, str]:
    fastest = max((row.forward.flops for row in rows if row.forward), default=0.0)
    return next((unit for unit in UNITS if fastest >= unit[0]), UNITS[-1])


def _pair(values: Sequence[float] | None, form: str) -> str:
    return "–" if values is None else " / ".join(f"{value:{form}}" for value in values)


def _both(row: KernelRow) -> tuple[Measured, Measured]:
    assert row.forward is not None
    assert row.backward is not None
    return row.forward, row.backward


def _speed(row: KernelRow, size: float) -> str:
    return _pair([measured.flops / size for measured in _both(row)], ".0f")


def _host(row: KernelRow) -> str:
    return _pair([1e6 * measured.host_seconds for measured in _both(row)], ",.0f")


def _ratios(row: KernelRow, other: KernelRow | None) -> list[float] | None:
    """FLOP/s relative to another implementation, forward and backward."""
    if other is None:
        return None
    return [a.flops / b.flops for a, b in zip(_both(row), _both(other), strict=True)]


def _overheads(row: KernelRow) -> list[float] | None:
    """Seconds of the whole call / seconds of its attention kernels."""
    found = [m.seconds / m.kernel_seconds for m in _both(row) if m.kernel_seconds]
    return found if len(found) == 2 else None


def _errors(row: KernelRow) -> str:
    if row.errors is None:
        return "–"
    worst = max(error for name, error in row.errors.items() if name != "out")
    return _pair([row.errors["out"], worst], ".1e")


def _reasons(rows: Sequence[KernelRow]) -> Iterator[str]:
    """One line per implementation and reason, with the masks that it applies to."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            masks = found.setdefault((row.implementation, row.reason), [])
            masks += [row.mask] if row.mask not in masks else []
    if found:
        yield ""
    for (name, reason), masks in found.items():
        everywhere = len(masks) == len({row.mask for row in rows})
        yield f"{name} did not run{'' if everywhere else ' on ' + ', '.join(masks)}: {reason}"
