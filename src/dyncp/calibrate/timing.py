"""How calls are timed: on the device, on the host, and kernel by kernel; and one rank of a plan
without its peers, which receives random numbers instead."""

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
    KernelChoice,
    backward,
    forward,
    make_executor,
    make_inputs,
)
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.kernels import IndexArrays, Kernel, KernelCall
from dyncp.plan import Op, RankPlan
from dyncp.transport import Buffers, Null, NullChannel

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


class RecordedKernel(Kernel):
    """Wraps a kernel, and records the device time of every `attend` and `attend_backward`."""

    def __init__(self, inner: Kernel, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._marks: list[tuple[Any, Any]] = []
        for name in Kernel.__annotations__:
            setattr(self, name, getattr(inner, name))

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        return self._inner.lower(call, arrays, backward=backward)

    def refuses(self, shape: AttentionShape) -> str:
        return self._inner.refuses(shape)

    def sequence_rows(self, lowered: Any, dim: int) -> Any:
        return self._inner.sequence_rows(lowered, dim)

    def attend(self, *args: Any, **options: Any) -> None:
        self._record(self._inner.attend, args, options)

    def attend_backward(self, *args: Any, **options: Any) -> None:
        self._record(self._inner.attend_backward, args, options)

    def _record(self, function: Callable[..., None], args: Any, options: Any) -> None:
        start = mark(self._device)
        function(*args, **options)
        self._marks.append((start, mark(self._device)))

    def take(self) -> list[float]:
        """Seconds of all calls since the last `take`, in order."""
        wait_for(self._device)
        marks, self._marks = self._marks, []
        return [seconds_between(start, end) for start, end in marks]


def time_calls(
    part: RankPlan,
    shape: AttentionShape,
    choice: KernelChoice,
    device: torch.device,
    repeats: Repeats,
) -> dict[Direction, CallTimes]:
    """Forward and backward of one rank. On GPUs seconds of kernels are missing, which `add_kernels`
    adds: time all calls first, since a profiler that ran once slows the host down."""
    executor = _executor(part, choice, device)
    if device.type == "cuda":
        return _time_on_gpu(executor.prepare(part), shape, device, repeats)
    recorded = RecordedKernel(executor.kernel, device)
    executor = DCPExecutor(device=device, transport=executor.transport, kernel=recorded)
    times = {}
    for direction, run in _runs(executor.prepare(part), shape, device).items():
        recorded.take()
        timed, divisions = time_call(run, device, repeats), _call_divisions(part, direction)
        calls, seconds = np.asarray(recorded.take()), np.zeros(0)
        if divisions:  # else a rank without tiles
            seconds = np.median(calls.reshape(-1, len(divisions))[-repeats.timed :], axis=0)
        times[direction] = CallTimes(
            timed.seconds, timed.host_seconds, _by_division(divisions, seconds)
        )
    return times


def _time_on_gpu(
    step: Step, shape: AttentionShape, device: torch.device, repeats: Repeats
) -> dict[Direction, CallTimes]:
    runs, inputs = _runs(step, shape, device), make_inputs(step.num_rows, shape, device)
    seconds = {way: time_call(run, device, repeats).seconds for way, run in runs.items()}
    host = host_seconds_per_call(
        lambda *qkv: attention(step, *qkv), inputs, device, repeats, backward=len(runs) > 1
    )
    return {way: CallTimes(seconds[way], host[way], np.zeros(1)) for way in runs}


def add_kernels(
    times: Mapping[Direction, CallTimes],
    part: RankPlan,
    shape: AttentionShape,
    choice: KernelChoice,
    device: torch.device,
) -> dict[Direction, CallTimes]:
    """Seconds of kernels by the profiler, which run one after the other for once: the durations of
    those that run beside each other say little. On CPUs they are there already."""
    if device.type != "cuda":
        return dict(times)
    executor = _executor(part, choice, device)
    executor.engine.graphs = replace(executor.engine.graphs, beside=False)
    found = {}
    for direction, run in _runs(executor.prepare(part), shape, device).items():
        for _ in range(WARM_UP):
            run()
        divisions = _call_divisions(part, direction)
        profiled = [profiled_kernels(run, device) for _ in range(PROFILED)]
        seconds = np.mean([seconds_by_call(x, len(divisions)) for x in profiled], axis=0)
        others = [k.seconds for kernels in profiled for k in kernels if not k.is_attention]
        found[direction] = replace(
            times[direction],
            division_seconds=_by_division(divisions, seconds),
            other_seconds=sum(others) / PROFILED,
        )
    return found


def _executor(part: RankPlan, choice: KernelChoice, device: torch.device) -> DCPExecutor:
    return make_executor(choice, device, transport=Noise(part.rank, part.num_ranks))


def _runs(step: Step, shape: AttentionShape, device: torch.device) -> dict[Direction, Run]:
    part = step.plan
    inputs = make_inputs(step.num_rows, shape, device, seed=part.rank)
    run = forward(lambda *qkv: attention(step, *qkv), inputs)
    runs: dict[Direction, Run] = {Direction.FORWARD: run}
    if part.mask_plan(DEFAULT_MASK).backward is not None:
        runs[Direction.BACKWARD] = backward(run(), inputs)
    return runs


def _by_division(divisions: list[int], seconds: Float64) -> Float64:
    found = np.bincount(divisions, seconds, minlength=1) if divisions else np.zeros(1)
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


class Noise(Null):
    """`Null`, but received buffers hold normally distributed numbers: GPUs multiply zeros faster,
    since they draw less power and clocks stay up. The buffers of a phase are adjacent in memory, so
    one copy fills them all. Calls only read them, so a repeated call finds them filled already:
    only the first of several equal calls spends time on it."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._noise: dict[torch.device, Tensor] = {}
        self._fills: dict[int, tuple[Buffers, Tensor, Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None  # of messages
        self._call, self._holds = -1, set[int]()  # buffers that hold numbers since a call's first
        self.filled: dict[int, torch.cuda.Event] = {}  # by phase, on GPUs

    def open(self, call: int = 0) -> "list[NullChannel]":
        if call != self._call:
            self._call, self._holds = call, set()
        return [NoiseChannel(self)]

    def fill(self, receives: Buffers) -> None:
        """The executor passes the same mapping in every call, so its extent is computed once."""
        if id(receives) in self._holds:
            return
        self._holds.add(id(receives))
        kept = self._fills.get(id(receives))
        if kept is None:
            buffers = list(receives.values())
            first, last = buffers[0], buffers[-1]
            span = last.data_ptr() + last.nbytes - first.data_ptr()
            whole = first.as_strided((span,), (1,))
            kept = self._fills[id(receives)] = receives, whole, self._bytes(span, first.device)
        _, target, source = kept
        target.copy_(source)

    def stream(self) -> torch.cuda.Stream:
        """That of messages, which torch takes long to tell."""
        if self._stream is None:
            self._stream = torch.cuda.current_stream()
        return self._stream

    def filled_event(self, phase: int, receives: Buffers) -> Any:
        """What `wait` waits for; None on CPUs."""
        if phase not in self.filled and next(iter(receives.values())).is_cuda:
            self.filled[phase] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return self.filled.get(phase)

    def _bytes(self, count: int, device: torch.device) -> Tensor:
        """Random bf16 numbers, whose bits are ordinary numbers as fp32 and fp16 too."""
        held = self._noise.get(device)
        if held is None or held.nbytes < count:
            numbers = torch.randn(-(-count // 2), device=device)
            held = self._noise[device] = numbers.bfloat16().view(torch.uint8)
        return held[:count]


class NoiseChannel(NullChannel):
    def __init__(self, transport: Noise) -> None:
        super().__init__(transport)
        self._noise = transport

    def launch(self, phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        super().launch(phase, sends, {})
        if not receives:
            return
        self._noise.fill(receives)
        if arrived is None:
            arrived = self._noise.filled_event(phase, receives)
        if arrived is not None:  # messages have a stream of their own
            arrived.record(self._noise.stream())

    def wait(self, phase: int) -> None:
        filled = self._noise.filled.get(phase)
        if filled is not None:
            filled.wait()
