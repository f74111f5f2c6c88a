"""Numbers the phases of schedules whose divisions are given.

Inputs of division d travel while division d - 1 computes, its results while division d + 1 does:

    launch code   0      1      2       3      4       5      ...
    phase         in(1)  in(2)  out(1)  in(3)  out(2)  in(4)  ...
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int64, frozen
from dyncp.blocks import Payload
from dyncp.schedule.schedule import Schedule, Transfers

# Bits of the number that holds all columns of a transfer.
ROOM = 63


# Entries: transfers whose phases are not numbered yet, and how they become `Transfers`.


class Entries(NamedTuple):
    """Transfers, int64[transfers] each, with codes that order their phases; `kind` may be that of
    all of them."""

    code: Int64
    source: Int64
    target: Int64
    kind: Int64 | Payload
    head_group: Int64
    block: Int64


def used_codes(entries: Sequence[Entries]) -> Int64:
    """The codes that occur, in order."""
    used = np.zeros(1 + max(int(own.code.max(initial=-1)) for own in entries), np.bool_)
    for own in entries:
        used[own.code] = True
    return np.flatnonzero(used)


def order_transfers(entries: Sequence[Entries], codes: Int64) -> Transfers:
    """All entries by phase, source, target, kind, head group and block; `codes` are those of the
    phases. One number holds all columns where it has room, since sorting numbers is fast."""
    phase = np.zeros(int(codes.max(initial=0)) + 1, np.int64)
    phase[codes] = np.arange(len(codes))
    most = [[len(codes), *(int(np.max(own, initial=0)) for own in entry[1:])] for entry in entries]
    bits = [max(own).bit_length() for own in zip(*most, strict=True)]
    if sum(bits) > ROOM:
        return _lexsorted(entries, phase)
    key, first = np.empty(sum(len(entry.code) for entry in entries), np.int64), 0
    for entry in entries:
        own = key[first : first + len(entry.code)]
        np.take(phase, entry.code, out=own)
        for column, width in zip(entry[1:], bits[1:], strict=True):
            own <<= width
            own |= column
        first += len(own)
    key.sort()
    found = []
    for width in bits[::-1]:
        found.append(frozen(key & ((1 << width) - 1)))
        key >>= width
    return Transfers(*found[::-1])


def _lexsorted(entries: Sequence[Entries], phase: Int64) -> Transfers:
    columns = [
        np.concatenate([np.broadcast_to(entry[i], len(entry.code)) for entry in entries])
        for i in range(len(Entries._fields))
    ]
    columns[0] = phase[columns[0]]
    order = np.lexsort(columns[::-1])
    return Transfers(*(frozen(column[order]) for column in columns))


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
