"""Schedule: the order of tiles and transfers for one mask and one direction, and the numbering of
phases."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32, Int64, frozen, sorted_order

Column = npt.NDArray[Any] | int


@dataclass(frozen=True, eq=False)
class Transfers:
    """Payloads between ranks, int32[transfers] each, ordered by phase, source, target, kind,
    head group and block. Results are merged in this order, not in the order of arrival."""

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
    after phase `phase_after_phase[p]` has arrived (-1: none). Its payloads are needed by division
    `phase_feeds[p]` (`num_divisions`: at the end). Two divisions after the local one, forward:

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

    FAR_INPUT = 0  # at the start, inter-node
    NEAR_INPUT = 1  # at the start, intra-node
    PASSED_ON = 2  # inputs that a relay received from another node, intra-node
    SUMMAND = 3  # results for a relay, which sends their sum to another node
    NEAR_RESULT = 4
    FAR_RESULT = 5
    # In static methods:
    RELAYED_RESULT = 6  # sums with the results of the previous such phase, after it arrived
    NEXT_INPUT = 7  # after the previous such phase arrived


class Launches(NamedTuple):
    """Transfers whose phases are not numbered yet, int64[transfers] each, or one number for all.

    If a transfer is launched at the start, `division` is the division that needs it. Otherwise it
    is launched after `division`, and an input is needed by `division` + 2."""

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
    """Makes a schedule in which transfers of the same phase kind and division share a phase."""
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
    """For every phase, the phase that must have arrived before it is launched, or -1. Blocks that
    are passed on for a division arrived for the division before it. Sums wait for the summands that
    were sent one division earlier. Phases of static methods wait for the previous one of their
    kind."""
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
    """Sorts transfers by phase, then source, and so on."""
    order = sorted_order(*((column, int(column.max(initial=0)) + 1) for column in columns[::-1]))
    return Transfers(*(frozen(column[order]) for column in columns))
