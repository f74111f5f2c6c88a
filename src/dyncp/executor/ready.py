"""When what a phase sends is ready: own inputs from the start, received ones when they came,
results with their last contribution."""

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.executor.lowering import LoweredProgram
from dyncp.plan import IS_INPUT, Op, Space
from dyncp.plan.workspace import block_keys, result_keys, times_of

START = -1  # the time at which own rows are ready


def ready_times(lowered: LoweredProgram) -> dict[int, int]:
    """By phase that this rank takes part in; times are indices of instructions."""
    sends, launched = lowered.program.sends, times_of(lowered.program, Op.LAUNCH)
    ready = {int(phase): START for phase in np.flatnonzero(launched >= 0)}
    for phase, time in zip(sends.phase.tolist(), send_times(lowered).tolist(), strict=True):
        ready[phase] = max(ready[phase], time)
    return ready


def send_times(lowered: LoweredProgram) -> Int64:
    """When each payload that this rank sends is ready."""
    program, part, found = lowered.program, lowered.part, lowered.found
    sends, received = program.sends, program.receives
    num_blocks, waits = len(part.blocks), times_of(program, Op.WAIT)
    times = np.full(len(sends), START, np.int64)
    arrived = waits[received.phase] if len(received) else np.zeros(0, np.int64)

    relayed = np.flatnonzero(IS_INPUT[sends.kind] & (part.blocks.owner[sends.block] != part.rank))
    if len(relayed):
        inputs = IS_INPUT[received.kind]
        came = (received.kind[inputs], received.head_group[inputs], received.block[inputs])
        known = _payload_keys(*came, num_blocks)
        order = np.argsort(known)
        wanted = (sends.kind[relayed], sends.head_group[relayed], sends.block[relayed])
        at = np.searchsorted(known[order], _payload_keys(*wanted, num_blocks))
        times[relayed] = arrived[inputs][order][at]

    results = np.flatnonzero(~IS_INPUT[sends.kind])
    if len(results):
        computed = block_keys(found.space, found.head_group, found.block, num_blocks)
        keys = np.concatenate([computed, result_keys(received, num_blocks)])
        when = np.concatenate([found.time, arrived[~IS_INPUT[received.kind]]])
        last = np.full(len(part.head_groups) * len(Space) * num_blocks, START, np.int64)
        np.maximum.at(last, keys, when)
        times[results] = last[result_keys(sends, num_blocks)]
    return times


def _payload_keys(kind: Int32, group: Int32, block: Int32, num_blocks: int) -> Int64:
    return (kind.astype(np.int64) * (1 << 16) + group) * num_blocks + block
