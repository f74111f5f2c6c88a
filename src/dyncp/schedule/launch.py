"""Phases of dynamic schedules.

Owners send at once, in the order of the divisions that need the blocks; nobody's computation holds
that up. A relay passes on what it got for division d - 1 while that computes, for division d.
Results of division d travel while division d + 1 computes, sums of them over borders another
division later:

    start              over borders for 1, 2, 3, ...; inside nodes for 1, 2, 3, ...
    after division d   what came over borders for d + 1, passed on for d + 2; results to be summed;
                       results inside nodes; results over borders

Results to be summed have a phase of their own: their relays wait for it early, while owners merge
at the end, in the order of phases.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int64, frozen
from dyncp.schedule.phases import Entries, order_transfers, used_codes
from dyncp.schedule.routes import Routes
from dyncp.schedule.schedule import Schedule
from dyncp.schedule.uses import Uses

Column = npt.NDArray[Any] | np.int64

# Kinds of phases in the order in which they are launched after the same division.
FAR_INPUT, NEAR_INPUT, HOP, SUMMAND, NEAR_RESULT, FAR_RESULT = range(6)
KINDS = 6


@dataclass(frozen=True, eq=False)
class Launches:
    """Uses with their routes; the division that each has its block for, and the one after which
    its results leave."""

    uses: Uses
    routes: Routes
    arrives: Int64
    leaves: Int64


def number_launches(
    tile_division: Int64,
    launches: Launches,
    payloads: tuple[Int64, Int64],
) -> Schedule:
    uses, routes = launches.uses, launches.routes
    far, hop = routes.crosses, routes.relay >= 0
    after = np.where(hop, launches.arrives - 2, -1)
    kind = np.select([far, hop], [FAR_INPUT, HOP], NEAR_INPUT)
    code = Code(int(launches.arrives.max(initial=0)) + 1)
    come = code.of(after, kind, launches.arrives)
    back = np.select([far, hop], [FAR_RESULT, SUMMAND], NEAR_RESULT)
    go = code.of(launches.leaves, back, np.zeros_like(kind))
    sent, result = (kinds[uses.side] for kinds in payloads)
    entries = [Entries(come, routes.source, uses.rank, sent, uses.head_group, uses.block)]
    back = np.flatnonzero(result >= 0)
    ends, what = (uses.rank, routes.source), (result, uses.head_group, uses.block)
    entries.append(Entries(go[back], *(column[back] for column in (*ends, *what))))
    return _number(tile_division, entries, code)


@dataclass(frozen=True, slots=True)
class Code:
    """Of a phase: the division that it is launched after, its kind and, for inputs, the division
    that it feeds, of so many."""

    feeds: int

    def of(self, after: Column, kind: Column, feeds: Column) -> Int64:
        return np.asarray(((after + 1) * KINDS + kind) * self.feeds + feeds, np.int64)

    def split(self, codes: Int64) -> tuple[Int64, Int64, Int64]:
        launch, feeds = np.divmod(codes, self.feeds)
        return launch // KINDS - 1, launch % KINDS, feeds


def _number(tile_division: Int64, entries: list[Entries], code: Code) -> Schedule:
    num_divisions, codes = int(tile_division.max(initial=0)) + 1, used_codes(entries)
    after, kind, feeds = code.split(codes)
    return Schedule(
        num_divisions=num_divisions,
        tile_division=frozen(tile_division),
        transfers=order_transfers(entries, codes),
        phase_after_division=frozen(np.minimum(after, num_divisions - 1)),
        phase_after_phase=frozen(_waits_for(codes, code)),
        phase_feeds=frozen(np.where(kind >= SUMMAND, num_divisions, feeds)),
    )


def _waits_for(codes: Int64, code: Code) -> Int64:
    """The phase that must have arrived: what is passed on for a division came for the one before
    it, and sums are made of the results that left one division earlier."""
    after, kind, feeds = code.split(codes)
    hop, total = kind == HOP, kind == FAR_RESULT
    waits_for = np.full_like(codes, -1)
    waits_for[hop] = code.of(np.int64(-1), np.int64(FAR_INPUT), feeds[hop] - 1)
    waits_for[total] = code.of(after[total] - 1, np.int64(SUMMAND), np.int64(0))
    phase = {int(own): number for number, own in enumerate(codes)}
    return np.array([phase.get(int(own), -1) for own in waits_for], np.int64)
