"""Schedule: the order of tiles and transfers for one mask and one direction, and how the phases of
transfers are numbered."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32, Int64, frozen

Column = npt.NDArray[Any] | int
# Bits of the number that holds all columns of a transfer.
KEY_BITS = 63


@dataclass(frozen=True, eq=False)
class Transfers:
    """Payloads between ranks, int32[transfers] each, ordered by phase, source, target, kind,
    head group and block. Results are merged in this order, whatever arrives first."""

    phase: Int32
    source: Int32
    target: Int32
    kind: Int32
    head_group: Int32
    block: Int32

    def __len__(self) -> int:
        return len(self.phase)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Divisions and numbered phases of one direction.

    Phase p is launched after division `phase_after_division[p]` is computed (-1: at the start) and
    after phase `phase_after_phase[p]` has arrived (-1: none); what it brings is needed by division
    `phase_feeds[p]` (`num_divisions`: by the end). Two divisions behind the local one, forward:

        phase 0 (inputs of 1)   travels while division 0 computes
        phase 1 (inputs of 2)   travels while division 1 computes
        phase 2 (results of 1)  travels while division 2 computes
        phase 3 (results of 2)  travels at the end
    """

    num_divisions: int
    tile_division: Int32
    transfers: Transfers
    phase_after_division: Int32
    phase_after_phase: Int32
    phase_feeds: Int32

    @property
    def num_phases(self) -> int:
        return len(self.phase_feeds)


class PhaseKind(IntEnum):
    """Kinds of phases, in the order in which they are launched after the same division."""

    FAR_INPUT = 0  # at the start, over node borders
    NEAR_INPUT = 1  # at the start, inside nodes
    PASSED_ON = 2  # inputs that came over a border, inside a node
    SUMMAND = 3  # results, to the rank that sends their sum over a border
    NEAR_RESULT = 4
    FAR_RESULT = 5
    # Of static methods:
    RELAYED_RESULT = 6  # with what arrived in the phase of results before
    NEXT_INPUT = 7  # once what the phase of inputs before it brought is there


class Launches(NamedTuple):
    """Transfers whose phases are not numbered yet, int64[transfers] each, or one number for all.

    `division` is the one that inputs feed which are launched at the start; the one after which
    others are launched: inputs among these feed the next but one."""

    phase_kind: Column
    division: Int64
    source: Int64
    target: Int64
    kind: Column
    head_group: Int64
    block: Int64


def number_phases(
    tile_division: Int64, num_divisions: int, launches: Sequence[Launches]
) -> Schedule:
    """The schedule. Transfers with the same kind of phase and the same division share a phase."""
    phase_kind, division, *what = (
        np.concatenate([np.broadcast_to(launch[i], launch.division.shape) for launch in launches])
        for i in range(len(Launches._fields))
    )
    kinds, starting = len(PhaseKind), 2 * (int(division.max(initial=0)) + 1)
    at_start = phase_kind < PhaseKind.PASSED_ON
    early = phase_kind * (starting // 2) + division
    code = np.where(at_start, early, starting + (division + 1) * kinds + phase_kind)
    codes = np.flatnonzero(np.bincount(code))
    number = np.zeros(int(codes.max(initial=0)) + 1, np.int64)
    number[codes] = np.arange(len(codes))
    at_start, later = codes < starting, codes - starting
    phase_kind = np.where(at_start, codes // (starting // 2), later % kinds)
    division = np.where(at_start, codes % (starting // 2), later // kinds - 1)
    is_result = (phase_kind >= PhaseKind.SUMMAND) & (phase_kind <= PhaseKind.RELAYED_RESULT)
    feeds = np.where(at_start, division, division + 2)
    return Schedule(
        num_divisions=num_divisions,
        tile_division=frozen(tile_division),
        transfers=_order_transfers([number[code], *what]),
        phase_after_division=frozen(np.where(at_start, -1, division.clip(max=num_divisions - 1))),
        phase_after_phase=frozen(_waits_for(phase_kind, division)),
        phase_feeds=frozen(np.where(is_result, num_divisions, feeds)),
    )


def _waits_for(phase_kind: Int64, division: Int64) -> list[int]:
    """The phase that must have arrived, or -1: what is passed on for a division came over the
    border for the one before it, sums are made of the results that left one division earlier, and
    static methods wait for the phase of the same kind before."""
    phases = list(zip(phase_kind.tolist(), division.tolist(), strict=True))
    number, latest, found = {phase: i for i, phase in enumerate(phases)}, dict[int, int](), []
    for i, (kind, launched) in enumerate(phases):
        waits = -1
        if kind == PhaseKind.PASSED_ON:
            waits = number.get((PhaseKind.FAR_INPUT, launched + 1), -1)
        elif kind == PhaseKind.FAR_RESULT:
            waits = number.get((PhaseKind.SUMMAND, launched - 1), -1)
        elif kind in (PhaseKind.RELAYED_RESULT, PhaseKind.NEXT_INPUT):
            waits = latest.get(kind, -1)
        latest[kind] = i
        found.append(waits)
    return found


def _order_transfers(columns: Sequence[Int64]) -> Transfers:
    """By phase, then source and so on. Columns are packed into one integer if they fit: sorting
    integers is fast."""
    bits = [int(column.max(initial=0)).bit_length() for column in columns]
    if sum(bits) > KEY_BITS:
        order = np.lexsort(columns[::-1])
        return Transfers(*(frozen(column[order]) for column in columns))
    key = np.zeros(len(columns[0]), np.int64)
    for column, width in zip(columns, bits, strict=True):
        key <<= width
        key |= column
    key.sort()
    ordered = []
    for width in bits[::-1]:
        ordered.append(frozen(key & ((1 << width) - 1)))
        key >>= width
    return Transfers(*ordered[::-1])
