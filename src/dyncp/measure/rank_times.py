"""One rank's real kernels from a real plan, timed without its peers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Direction
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.measure.host_time import host_seconds_per_call
from dyncp.measure.implementation import backward, forward
from dyncp.measure.inputs import make_inputs
from dyncp.measure.kernel_seconds import KernelRun, profiled_kernels
from dyncp.measure.noise import Noise
from dyncp.measure.ours import KernelChoice, make_executor
from dyncp.measure.recorded_kernel import RecordedKernel
from dyncp.measure.timing import Repeats, Run, time_call
from dyncp.plan import Op, RankPlan

logger = logging.getLogger(__name__)

# Profiled runs that durations of kernels are the mean of; they differ by a percent or two.
PROFILED = 2


@dataclass(frozen=True, eq=False)
class CallTimes:
    """One attention call in one direction: the whole call on the device, the host until it is
    queued, one of several in a row, and its kernel calls, in seconds by division (0 where a
    division has no tiles).

    On GPUs the latter are the profiler's durations of the attention kernels, without pauses for
    the host; `other_seconds` are those of all other kernels: packing, merging, rounding. On CPUs
    whole kernel calls count, and `other_seconds` is None."""

    seconds: float
    host_seconds: float
    division_seconds: Float64
    other_seconds: float | None = None

    @property
    def kernel_seconds(self) -> float:
        return float(self.division_seconds.sum())


def time_part(
    part: RankPlan,
    shape: AttentionShape,
    choice: KernelChoice,
    device: torch.device,
    repeats: Repeats,
) -> dict[Direction, CallTimes]:
    """Forward and backward of one rank."""
    recorded, step = _prepare(part, choice, device)
    inputs = make_inputs(step.num_rows, shape, device, seed=part.rank)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(step, q, k, v)

    run, has_backward = forward(attend, inputs), part.mask_plan(DEFAULT_MASK).backward is not None
    times = {Direction.FORWARD: _time(run, recorded, part, Direction.FORWARD, device, repeats)}
    if has_backward:
        run_backward = backward(run(), inputs)
        times[Direction.BACKWARD] = _time(
            run_backward, recorded, part, Direction.BACKWARD, device, repeats
        )
    if device.type == "cuda":
        host = host_seconds_per_call(attend, inputs, device, repeats, backward=has_backward)
        times = {way: replace(one, host_seconds=host[way]) for way, one in times.items()}
    return times


def _prepare(
    part: RankPlan, choice: KernelChoice, device: torch.device
) -> tuple[RecordedKernel | None, Step]:
    """On GPUs as it always runs, with graphs; on CPUs with a kernel that notes its times."""
    executor = make_executor(choice, device, transport=Noise(part.rank, part.num_ranks))
    if device.type == "cuda":
        return None, executor.prepare(part)
    recorded = RecordedKernel(executor.kernel, device)
    executor = DCPExecutor(device=device, transport=executor.transport, kernel=recorded)
    return recorded, executor.prepare(part)


def _time(
    run: Run,
    recorded: RecordedKernel | None,
    part: RankPlan,
    direction: Direction,
    device: torch.device,
    repeats: Repeats,
) -> CallTimes:
    divisions = _call_divisions(part, direction)
    num_calls, other = len(divisions), None
    if recorded is None:
        timed = time_call(run, device, repeats)
        profiled = [profiled_kernels(run, device) for _ in range(PROFILED)]
        seconds = np.mean([seconds_by_call(kernels, num_calls) for kernels in profiled], axis=0)
        others = [k.seconds for kernels in profiled for k in kernels if not k.is_attention]
        other = sum(others) / PROFILED
    else:
        recorded.take()
        timed, seconds = time_call(run, device, repeats), np.zeros(0)
        calls = np.asarray(recorded.take())
        if num_calls:  # else a rank without tiles
            seconds = np.median(calls.reshape(-1, num_calls)[-repeats.timed :], axis=0)
    by_division = np.bincount(divisions, seconds, minlength=1) if num_calls else np.zeros(1)
    return CallTimes(timed.seconds, timed.host_seconds, by_division.astype(np.float64), other)


def seconds_by_call(kernels: Sequence[KernelRun], num_calls: int) -> Float64:
    """Seconds of the attention kernels of every call: every call has as many, in order.

    Three kernels of 1, 2 and 3 seconds in three calls are one each. Where kernels do not divide
    into calls, every call gets the same share."""
    seconds = np.asarray([kernel.seconds for kernel in kernels if kernel.is_attention])
    if not num_calls:
        return np.zeros(0)
    if len(seconds) % num_calls == 0:
        by_call: Float64 = seconds.reshape(num_calls, -1).sum(axis=1)
        return by_call
    logger.warning(
        "the profiler saw %d attention kernels in %d kernel calls; their sum is shared out",
        len(seconds),
        num_calls,
    )
    return np.full(num_calls, seconds.sum() / num_calls)


def _call_divisions(part: RankPlan, direction: Direction) -> list[int]:
    """The division of every kernel call, in the order in which the program makes them."""
    mask = part.mask_plan(DEFAULT_MASK)
    program = mask.program(direction)
    divisions = []
    for op, division in program.instructions.tolist():
        if op == Op.COMPUTE:
            groups = np.unique(mask.tiles.head_group[program.tile_division == division])
            divisions += [division] * len(groups)
    return divisions
