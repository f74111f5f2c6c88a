"""One rank's real kernels from a real plan, timed without its peers."""

from dataclasses import dataclass

import numpy as np
import torch

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Direction
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.measure.implementation import backward, forward
from dyncp.measure.inputs import make_inputs
from dyncp.measure.noise import Noise
from dyncp.measure.ours import KernelChoice, make_executor
from dyncp.measure.recorded_kernel import RecordedKernel
from dyncp.measure.timing import Repeats, Run, time_call
from dyncp.plan import Op, RankPlan
from dyncp.transport import Transport


@dataclass(frozen=True, eq=False)
class CallTimes:
    """One attention call in one direction: the whole call on the device, the host until it
    returns, and its kernel calls, in seconds by division (0 where a division has no tiles)."""

    seconds: float
    host_seconds: float
    division_seconds: Float64

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
    kernel, step = _recorded_step(part, choice, device)
    inputs = make_inputs(step.num_rows, shape, device, seed=part.rank)
    run = forward(lambda q, k, v: attention(step, q, k, v), inputs)
    times = {Direction.FORWARD: _time(run, kernel, part, Direction.FORWARD, device, repeats)}
    if part.mask_plan(DEFAULT_MASK).backward is not None:
        run_backward = backward(run(), inputs)
        times[Direction.BACKWARD] = _time(
            run_backward, kernel, part, Direction.BACKWARD, device, repeats
        )
    return times


def _recorded_step(
    part: RankPlan, choice: KernelChoice, device: torch.device
) -> tuple[RecordedKernel, Step]:
    def transport() -> Transport:
        return Noise(part.rank, part.num_ranks)

    plain = make_executor(choice, device, transport=transport())
    kernel = RecordedKernel(plain.kernel, device)
    executor = DCPExecutor(device=device, transport=transport(), kernel=kernel)
    return kernel, executor.prepare(part)


def _time(
    run: Run,
    kernel: RecordedKernel,
    part: RankPlan,
    direction: Direction,
    device: torch.device,
    repeats: Repeats,
) -> CallTimes:
    kernel.take()
    timed = time_call(run, device, repeats)
    divisions = _call_divisions(part, direction)
    calls = np.asarray(kernel.take())
    if not divisions:  # a rank without tiles
        return CallTimes(timed.seconds, timed.host_seconds, np.zeros(1))
    medians = np.median(calls.reshape(-1, len(divisions))[-repeats.timed :], axis=0)
    by_division = np.bincount(divisions, medians)
    return CallTimes(timed.seconds, timed.host_seconds, by_division.astype(np.float64))


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
