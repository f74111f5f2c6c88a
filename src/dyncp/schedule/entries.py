"""Entries: transfers whose phases are not numbered yet, and how they become `Transfers`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dyncp.arrays import Int64, frozen
from dyncp.blocks import Payload
from dyncp.schedule.schedule import Transfers

# Bits of the number that holds all columns of a transfer.
ROOM = 63


class Entries(NamedTuple):
    """Transfers of one kind, int64[transfers] each, with codes that order their phases."""

    code: Int64
    source: Int64
    target: Int64
    kind: Payload
    head_group: Int64
    block: Int64


def used_codes(entries: Sequence[Entries]) -> Int64:
    """The codes that occur, in order."""
    counts = [np.bincount(own.code) for own in entries]
    used = np.zeros(max((len(count) for count in counts), default=0), np.bool_)
    for count in counts:
        used[: len(count)] |= count > 0
    return np.flatnonzero(used)


def order_transfers(entries: Sequence[Entries], codes: Int64) -> Transfers:
    """All entries by phase, source, target, kind, head group and block; `codes` are those of the
    phases. One number holds all columns where it has room, since sorting numbers is fast."""
    phase = np.zeros(int(codes.max(initial=0)) + 1, np.int64)
    phase[codes] = np.arange(len(codes))
    columns = [(phase[own.code], *own[1:]) for own in entries]
    most = [max(int(np.max(own[i], initial=0)) for own in columns) for i in range(len(columns[0]))]
    bits = [number.bit_length() for number in most]
    if sum(bits) > ROOM:
        return _lexsorted(columns)
    key = np.concatenate([_pack(own, bits) for own in columns])
    key.sort()
    found = []
    for width in bits[::-1]:
        found.append(frozen(key & ((1 << width) - 1)))
        key >>= width
    return Transfers(*found[::-1])


Columns = tuple[Any, ...]  # an array each, or one number for all


def _pack(columns: Columns, bits: Sequence[int]) -> Int64:
    key: Int64 = columns[0].copy()
    for column, width in zip(columns[1:], bits[1:], strict=True):
        key <<= width
        key |= column
    return key


def _lexsorted(entries: Sequence[Columns]) -> Transfers:
    columns = [
        np.concatenate([np.broadcast_to(own[i], len(own[0])) for own in entries])
        for i in range(len(entries[0]))
    ]
    order = np.lexsort(columns[::-1])
    return Transfers(*(frozen(column[order]) for column in columns))
