"""How calls are timed: on the device, on the host, and kernel by kernel; and the work of every
division of a plan."""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Direction
from dyncp.calibrate.calls import (
    Attend,
    Inputs,
    Noise,
    RecordedKernel,
    backward,
    forward,
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
# queued all of the call by then; at most this many cycles (50 ms).
HEAD_START, MOST_CYCLES, CYCLES_PER_SECOND = 2.0, 100_000_000, 2e9
# Substrings of the names of attention kernels, ours and others'; the rest packs, merges and rounds.
ATTENTION_NAMES = ("flash", "attend", "attention", "fmha", "sdpa")
# Their helpers, which are not the attention itself.
HELPER_NAMES = ("preprocess", "postprocess", "combine", "merge")
# Profiled runs that kernel durations are averaged over; they differ by a percent or two.
PROFILED = 2
# Calls before, which compile and capture.
WARM_UP = 3
# Attention calls in a row that host time is averaged over: they share autograd's fixed cost.
LAYERS = 8

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians. `seconds` is the device's time while the host keeps ahead of it; `host_seconds` is
    until the call returns. On CPUs both are the same."""

    seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a call is timed, after how many warm-up calls. `flush` clears the GPU's L2 cache
    before every call."""

    timed: int = 7
    warm_up: int = 2
    flush: bool = True

    def __post_init__(self) -> None:
        if self.timed < 1 or self.warm_up < 0:
            raise ValueError(
                f"repeats are {self.timed} after {self.warm_up} warm-up calls; at least 1 after 0 "
                "are needed"
            )


def time_call(run: Run, device: torch.device, repeats: Repeats | None = None) -> Timed:
    """Median times of `run`, which may only use the current stream."""
    repeats = repeats or Repeats()
    for _ in range(repeats.warm_up):
        run()
    wait_for(device)
    host = [_host_seconds(run, device) for _ in range(repeats.timed)]
    host_seconds = statistics.median(host)
    if device.type != "cuda":
        return Timed(host_seconds, host_seconds)
    return Timed(statistics.median(_cuda_seconds(run, device, repeats, max(host))), host_seconds)


def mark(device: torch.device) -> Any:
    """A point in time: an event on the current stream, or the host's clock on CPUs."""
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two marks; the device must have passed the second."""
    if isinstance(start, float):
        return float(end - start)
    return 1e-3 * float(start.elapsed_time(end))


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_seconds(run: Run, device: torch.device) -> float:
    """Until the call returns, on an idle device."""
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
        start = mark(device)
        run()
        end = mark(device)
        wait_for(device)
        seconds.append(seconds_between(start, end))
    return seconds


class KernelRun(NamedTuple):
    """One kernel on the device; `start` is on the profiler's clock."""

    name: str
    seconds: float
    start: float = 0.0

    @property
    def is_attention(self) -> bool:
        """Whether it computes attention itself, and does not prepare or merge."""
        name = self.name.lower()
        return any(part in name for part in ATTENTION_NAMES) and not any(
            part in name for part in HELPER_NAMES
        )


def profiled_kernels(run: Run, device: torch.device) -> list[KernelRun]:
    """Kernels, copies and fills of one call in the order in which they started. Gaps in which the
    device waits for the host count for none of them."""
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
    queued, and its kernel calls in seconds by division (0 for a division without tiles).

    On GPUs kernel calls are the profiler's durations of attention kernels, without gaps in which
    the device waits for the host, and `other_seconds` those of all other kernels: packing, merging,
    rounding. On CPUs whole kernel calls count, and `other_seconds` is None."""

    seconds: float
    host_seconds: float
    division_seconds: Float64
    other_seconds: float | None = None

    @property
    def kernel_seconds(self) -> float:
        return float(self.division_seconds.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Tools:
    """What the calls of ranks are timed with; `kernel` as in `executor_options`."""

    shape: AttentionShape
    kernel: str
    device: torch.device
    repeats: Repeats

    def executor(self, part: RankPlan, *, graphs: str = "auto") -> DCPExecutor:
        """For one rank without its peers."""
        noise = Noise(part.rank, part.num_ranks)
        return make_executor(self.kernel, self.device, transport=noise, graphs=graphs)

    def runs(self, step: Step) -> dict[Direction, Run]:
        """Forward and, where it is planned, backward."""
        part = step.plan
        inputs = make_inputs(step.num_rows, self.shape, self.device, seed=part.rank)
        run = forward(lambda *qkv: attention(step, *qkv), inputs)
        runs: dict[Direction, Run] = {Direction.FORWARD: run}
        if part.mask_plan(DEFAULT_MASK).backward is not None:
            runs[Direction.BACKWARD] = backward(run(), inputs)
        return runs


def time_calls(part: RankPlan, tools: Tools) -> dict[Direction, CallTimes]:
    """Forward and backward of one rank. On GPUs seconds of kernels are missing, which `add_kernels`
    adds: time all calls first, since a profiler that ran once slows the host down."""
    executor, device, repeats = tools.executor(part), tools.device, tools.repeats
    if device.type == "cuda":
        return _time_on_gpu(executor.prepare(part), tools)
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


def _time_on_gpu(step: Step, tools: Tools) -> dict[Direction, CallTimes]:
    runs, inputs = tools.runs(step), make_inputs(step.num_rows, tools.shape, tools.device)
    seconds = {
        way: time_call(run, tools.device, tools.repeats).seconds for way, run in runs.items()
    }
    host = host_seconds_per_call(
        lambda *qkv: attention(step, *qkv),
        inputs,
        tools.device,
        tools.repeats,
        backward=len(runs) > 1,
    )
    return {way: CallTimes(seconds[way], host[way], np.zeros(1)) for way in runs}


def add_kernels(
    times: Mapping[Direction, CallTimes], part: RankPlan, tools: Tools
) -> dict[Direction, CallTimes]:
    """Seconds of kernels by the profiler, with kernels serialised: durations of overlapping kernels
    say little. On CPUs they are there already."""
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
    found = np.bincount(np.asarray(divisions, np.int64), seconds, minlength=1)
    return found.astype(np.float64)


def seconds_by_call(kernels: Sequence[KernelRun], num_calls: int) -> Float64:
    """Seconds of the attention kernels of every call, which all have the same number of kernels.

    Four kernels of 1, 2, 3 and 4 seconds in two calls give 3 and 7. Where kernels do not divide
    into calls, every call gets the same share."""
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


def host_seconds_per_call(
    attend: Attend, inputs: Inputs, device: torch.device, repeats: Repeats, *, backward: bool
) -> dict[Direction, float]:
    """The host's median time to queue one of `LAYERS` attention calls in a row, as in a model, on
    a device that is idle before the first."""
    kv = [tuple(x.detach().clone().requires_grad_() for x in inputs.qkv[1:]) for _ in range(LAYERS)]
    leaves = [inputs.q, *(x for pair in kv for x in pair)]
    seconds: dict[Direction, list[float]] = {Direction.FORWARD: [], Direction.BACKWARD: []}
    for _ in range(repeats.warm_up + repeats.timed):
        out: Tensor = inputs.q
        wait_for(device)
        start = time.perf_counter()
        for k, v in kv:
            out = attend(out, k, v)
        seconds[Direction.FORWARD].append(time.perf_counter() - start)
        if backward:
            wait_for(device)
            start = time.perf_counter()
            torch.autograd.grad(out, leaves, inputs.dout)
            seconds[Direction.BACKWARD].append(time.perf_counter() - start)
    wait_for(device)
    return {
        direction: statistics.median(found[repeats.warm_up :]) / LAYERS
        for direction, found in seconds.items()
        if found
    }


@dataclass(frozen=True, slots=True)
class DivisionWork:
    """One division of one rank in the cost model's terms. `pairs`, `area`, `edge` and `tile_rows`
    count every q head; `rows` and `keys` are those of the blocks that it reads, `longest` the keys
    of the longest rows of kernel tiles, and `calls` its kernel calls."""

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
    """All divisions of all ranks that have tiles, by rank and division."""
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
