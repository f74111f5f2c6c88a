"""Times calls on the device, on the host, and kernel by kernel; and says how much work each
division of a plan has."""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Direction
from dyncp.calibrate.calls import (
    Noise,
    RecordedKernel,
    Run,
    both_directions,
    make_executor,
    make_inputs,
)
from dyncp.cost import CostModel
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.plan import Op, Plan, RankPlan
from dyncp.simulate.flow import layer_of_plan
from dyncp.simulate.layer import call_work

logger = logging.getLogger(__name__)

# Larger than the L2 cache of any GPU so far: writing it evicts the inputs.
FLUSH_BYTES = 256 << 20
# Before a timed call the GPU sleeps for this many times the host's time, so that the host has
# queued the whole call when the GPU wakes up; at most this many cycles (50 ms).
HEAD_START, MOST_CYCLES, CYCLES_PER_SECOND = 2.0, 100_000_000, 2e9
# Parts of the names of attention kernels, ours and others'. All other kernels pack, merge or round.
ATTENTION_NAMES = ("flash", "attend", "attention", "fmha", "sdpa")
# Parts of the names of helper kernels, which do not compute attention themselves.
HELPER_NAMES = ("preprocess", "postprocess", "combine", "merge")
# Kernel durations are averaged over this many profiled runs, which differ by a percent or two.
PROFILED = 2
# Runs before the first profiled one; they compile kernels and capture graphs.
WARM_UP = 3
# Host time is averaged over this many consecutive attention calls: they share the fixed cost of
# autograd.
LAYERS = 8


@dataclass(frozen=True, slots=True)
class Timed:
    """Median seconds of a call: on the device, while the host stays ahead of it; and on the host,
    until the call returns. On CPUs both are the same."""

    seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class Repeats:
    """A call is timed `timed` times after `warm_up` untimed calls. `flush` clears the GPU's L2
    cache before every timed call."""

    timed: int = 7
    warm_up: int = 2
    flush: bool = True

    def __post_init__(self) -> None:
        if self.timed < 1 or self.warm_up < 0:
            raise ValueError(
                f"repeats are {self.timed} after {self.warm_up} warm-up calls; at least 1 timed "
                "call is needed, and 0 warm-up calls"
            )


def time_call(run: Run, device: torch.device, repeats: Repeats | None = None) -> Timed:
    """Median times of `run`, which may use the current stream only."""
    repeats = repeats or Repeats()
    for _ in range(repeats.warm_up):
        run()
    wait_for(device)
    host = [host_seconds(run, device) for _ in range(repeats.timed)]
    median = statistics.median(host)
    if device.type != "cuda":
        return Timed(median, median)
    return Timed(statistics.median(_cuda_seconds(run, device, repeats, max(host))), median)


def mark(device: torch.device) -> Any:
    """A point in time: an event on the current stream, or the host's clock on CPUs."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two marks; the device must have reached the second one."""
    if isinstance(start, float):
        return float(end - start)
    return 1e-3 * float(start.elapsed_time(end))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_seconds(run: Run, device: torch.device) -> float:
    """Seconds until the call returns. The device must be idle, and is idle again afterwards."""
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    wait_for(device)
    return seconds


def _cuda_seconds(run: Run, device: torch.device, repeats: Repeats, host: float) -> list[float]:
    cycles = min(MOST_CYCLES, int(HEAD_START * host * CYCLES_PER_SECOND))
    cache = torch.empty(FLUSH_BYTES if repeats.flush else 0, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats.timed):
        cache.zero_()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        seconds.append(device_seconds(run, device))
    return seconds


def device_seconds(run: Run, device: torch.device) -> float:
    """Seconds of one call on the current stream."""
    start = mark(device)
    run()
    end = mark(device)
    wait_for(device)
    return seconds_between(start, end)


class KernelRun(NamedTuple):
    """One kernel on the device; `start` is in seconds of the profiler's clock."""

    name: str
    seconds: float
    start: float = 0.0

    @property
    def is_attention(self) -> bool:
        """Whether it computes attention, rather than preparing or merging it."""
        name = self.name.lower()
        return any(part in name for part in ATTENTION_NAMES) and not any(
            part in name for part in HELPER_NAMES
        )


def profiled_kernels(run: Run, device: torch.device) -> list[KernelRun]:
    """Kernels, copies and fills of one call, in the order in which they started. Their seconds do
    not include gaps in which the device waits for the host."""
    wait_for(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        wait_for(device)
    events = [e for e in profiler.events() or () if e.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    return [
        KernelRun(e.name, 1e-6 * e.time_range.elapsed_us(), 1e-6 * e.time_range.start)
        for e in events
    ]


@dataclass(frozen=True, eq=False)
class CallTimes:
    """One attention call in one direction: `seconds` on the device, `host_seconds` until it is
    queued, and the seconds of its kernel calls by division (0 for a division without tiles).

    On GPUs `division_seconds` are the profiler's durations of attention kernels, without gaps in
    which the device waits for the host, and `other_seconds` are the durations of all other kernels,
    which pack, merge and round. On CPUs whole kernel calls are timed, and `other_seconds` is
    None."""

    seconds: float
    host_seconds: float
    division_seconds: Float64
    other_seconds: float | None = None

    @property
    def kernel_seconds(self) -> float:
        return float(self.division_seconds.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Tools:
    """How the calls of single ranks are timed; `kernel` is named as in `executor_options`."""

    shape: AttentionShape
    kernel: str
    device: torch.device
    repeats: Repeats

    def executor(self, part: RankPlan, *, graphs: str = "auto") -> DCPExecutor:
        """An executor for one rank without its peers."""
        noise = Noise(part.rank, part.num_ranks)
        return make_executor(self.kernel, self.device, transport=noise, graphs=graphs)

    def runs(self, step: Step) -> dict[Direction, Run]:
        """The forward and the backward call of a step."""
        inputs = make_inputs(step.num_rows, self.shape, self.device, seed=step.plan.rank)
        return both_directions(partial(attention, step), inputs)


def time_calls(part: RankPlan, tools: Tools) -> dict[Direction, CallTimes]:
    """Times forward and backward of one rank. On GPUs the seconds of kernels are still missing:
    `add_kernels` adds them after all calls are timed, since profiling slows the host down for
    good."""
    executor, device, repeats = tools.executor(part), tools.device, tools.repeats
    if device.type == "cuda":
        step = executor.prepare(part)
        timings = {way: time_call(run, device, repeats) for way, run in tools.runs(step).items()}
        host = _queueing_seconds(step, tools)
        return {way: CallTimes(timings[way].seconds, host[way], np.zeros(1)) for way in Direction}
    recorded = RecordedKernel(executor.kernel)
    executor = DCPExecutor(device=device, transport=executor.transport, kernel=recorded)
    times = {}
    for direction, run in tools.runs(executor.prepare(part)).items():
        recorded.seconds.clear()
        timed, divisions = time_call(run, device, repeats), _call_divisions(part, direction)
        seconds = np.zeros(0)
        if divisions:  # else a rank without tiles
            calls = np.asarray(recorded.seconds).reshape(-1, len(divisions))
            seconds = np.median(calls[-repeats.timed :], axis=0)
        times[direction] = CallTimes(
            timed.seconds, timed.host_seconds, _by_division(divisions, seconds)
        )
    return times


def add_kernels(
    times: Mapping[Direction, CallTimes], part: RankPlan, tools: Tools
) -> dict[Direction, CallTimes]:
    """Adds the seconds of kernels, measured by the profiler while kernels run one at a time, since
    durations of overlapping kernels say little. On CPUs `times` has them already."""
    if tools.device.type != "cuda":
        return dict(times)
    executor = tools.executor(part, graphs="serial")
    found = {}
    for direction, run in tools.runs(executor.prepare(part)).items():
        for _ in range(WARM_UP):
            run()
        divisions = _call_divisions(part, direction)
        profiled = [profiled_kernels(run, tools.device) for _ in range(PROFILED)]
        seconds = np.mean([seconds_by_call(x, len(divisions)) for x in profiled], axis=0)
        others = [k.seconds for kernels in profiled for k in kernels if not k.is_attention]
        found[direction] = replace(
            times[direction],
            division_seconds=_by_division(divisions, seconds),
            other_seconds=sum(others) / PROFILED,
        )
    return found


def _by_division(divisions: list[int], seconds: Float64) -> Float64:
    """Sums the seconds of kernel calls by division."""
    found = np.bincount(np.asarray(divisions, np.int64), seconds, minlength=1)
    return found.astype(np.float64)


def seconds_by_call(kernels: Sequence[KernelRun], num_calls: int) -> Float64:
    """Seconds of attention kernels by kernel call; every call has the same number of kernels.

    Four kernels of 1, 2, 3 and 4 seconds in two calls give 3 and 7. If the number of kernels is not
    a multiple of the number of calls, every call gets the same share."""
    seconds = np.asarray([kernel.seconds for kernel in kernels if kernel.is_attention])
    if not num_calls:
        return np.zeros(0)
    if len(seconds) % num_calls == 0:
        by_call: Float64 = seconds.reshape(num_calls, -1).sum(axis=1)
        return by_call
    logger.warning(
        "the profiler saw %d attention kernels in %d kernel calls; every call gets an equal share",
        len(seconds),
        num_calls,
    )
    return np.full(num_calls, seconds.sum() / num_calls)


def _call_divisions(part: RankPlan, direction: Direction) -> list[int]:
    """The division of every kernel call, in program order."""
    mask = part.mask_plan(DEFAULT_MASK)
    program = mask.program(direction)
    divisions = []
    for op, division in program.instructions.tolist():
        if op == Op.COMPUTE:
            groups = np.unique(mask.tiles.head_group[program.tile_division == division])
            divisions += [division] * len(groups)
    return divisions


def _queueing_seconds(step: Step, tools: Tools) -> dict[Direction, float]:
    """The host's median seconds to queue one of `LAYERS` consecutive attention calls, as in a
    model. The device is idle before the first call."""
    device, repeats = tools.device, tools.repeats
    inputs = make_inputs(step.num_rows, tools.shape, device)
    kv = [tuple(x.detach().clone().requires_grad_() for x in inputs.qkv[1:]) for _ in range(LAYERS)]
    leaves = [inputs.q, *(x for pair in kv for x in pair)]
    seconds: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    for _ in range(repeats.warm_up + repeats.timed):
        out = inputs.q
        wait_for(device)
        start = time.perf_counter()
        for k, v in kv:
            out = attention(step, out, k, v)
        seconds[Direction.FORWARD].append(time.perf_counter() - start)
        wait_for(device)
        start = time.perf_counter()
        torch.autograd.grad(out, leaves, inputs.dout)
        seconds[Direction.BACKWARD].append(time.perf_counter() - start)
    wait_for(device)
    return {
        direction: statistics.median(found[repeats.warm_up :]) / LAYERS
        for direction, found in seconds.items()
    }


@dataclass(frozen=True, slots=True)
class DivisionWork:
    """The work of one division on one rank, in the cost model's terms.

    `pairs`, `area`, `edge` and `tile_rows` are summed over q heads. `rows` and `keys` are tokens of
    the blocks that it reads, `longest` is the number of keys of the longest rows of kernel tiles,
    and `calls` is its number of kernel calls."""

    rank: int
    division: int
    pairs: int
    area: float
    edge: float
    tile_rows: float
    longest: float
    tiles: int
    rows: int
    keys: int
    calls: int
    predicted_seconds: float


def plan_work(plan: Plan, direction: Direction, cost: CostModel) -> list[DivisionWork]:
    """The work of every division that has tiles, ordered by rank and division."""
    layer, _ = layer_of_plan(plan, DEFAULT_MASK, direction, cost)
    tiles = layer.tiles
    pairs = tiles.pairs * cost.heads_of(layer.groups)[tiles.head_group]
    work = call_work(layer, cost)
    seconds = cost.work_seconds(*work[1:], direction) + cost.profile.call_seconds
    found = []
    for cell in np.unique(layer.cell).tolist():
        chosen, calls = layer.cell == cell, work.cell == cell
        found.append(
            DivisionWork(
                rank=cell // layer.num_divisions,
                division=cell % layer.num_divisions,
                pairs=int(pairs[chosen].sum()),
                area=float(work.area[calls].sum()),
                edge=float(work.edge[calls].sum()),
                tile_rows=float(work.rows[calls].sum()),
                longest=float(work.longest[calls].sum()),
                tiles=int(chosen.sum()),
                rows=int(layer.tokens[np.unique(tiles.q_block[chosen])].sum()),
                keys=int(layer.tokens[np.unique(tiles.k_block[chosen])].sum()),
                calls=int(calls.sum()),
                predicted_seconds=float(seconds[calls].sum()),
            )
        )
    return found
