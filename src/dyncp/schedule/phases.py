"""Numbers the phases of schedules whose divisions are given.

Inputs of division d travel while division d - 1 computes, its results while division d + 1 does:

    launch code   0      1      2       3      4       5      ...
    phase         in(1)  in(2)  out(1)  in(3)  out(2)  in(4)  ...
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int64, frozen
from dyncp.blocks import Payload
from dyncp.schedule.entries import Entries, order_transfers, used_codes
from dyncp.schedule.schedule import Schedule

Column = npt.NDArray[Any]


def input_entries(
    division: Column, source: Column, target: Column, kind: Payload, group: Column, block: Column
) -> Entries:
    """What must be there when `division` (from 1 on) computes."""
    return _entries(np.maximum(2 * division - 3, 0), source, target, kind, group, block)


def result_entries(
    division: Column, source: Column, target: Column, kind: Payload, group: Column, block: Column
) -> Entries:
    """What is complete when `division` is computed."""
    return _entries(2 * division, source, target, kind, group, block)


def _entries(code: Column, source: Column, target: Column, kind: Payload, *what: Column) -> Entries:
    code, source, target, group, block = (
        own.astype(np.int64) for own in (code, source, target, *what)
    )
    return Entries(code, source, target, kind, group, block)


def number_phases(
    tile_division: Int64, num_divisions: int, entries: list[Entries], *, relayed_results: bool
) -> Schedule:
    """The schedule. With `relayed_results` a phase of results waits for the one before it, whose
    results its senders have summed into theirs."""
    phase_code = used_codes(entries)
    is_input = (phase_code % 2 == 1) | (phase_code == 0)
    division = np.where(is_input, (phase_code + 3) // 2, phase_code // 2)
    after_phase = np.where(is_input, _earlier(is_input), -1)
    if relayed_results:
        after_phase = np.where(is_input, after_phase, _earlier(~is_input))
    after_division = np.where(is_input, division - 2, np.minimum(division, num_divisions - 1))
    return Schedule(
        num_divisions=num_divisions,
        tile_division=frozen(tile_division),
        transfers=order_transfers(entries, phase_code),
        phase_after_division=frozen(after_division),
        phase_after_phase=frozen(after_phase),
        phase_feeds=frozen(np.where(is_input, division, num_divisions)),
    )


def _earlier(chosen: Column) -> Int64:
    """For every phase the last chosen one before it, or -1: 1 0 1 1 gives -1 0 0 2."""
    number = np.where(chosen, np.arange(len(chosen)), -1)
    latest: Int64 = np.append(-1, np.maximum.accumulate(number))[: len(chosen)]
    return latest
