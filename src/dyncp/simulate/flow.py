"""Flow: what all ranks do in one direction of one attention layer, as flat arrays."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.cost import CostModel
from dyncp.plan import Op


class Programs(NamedTuple):
    """Instructions of all ranks; those of rank r are `first[r]` to `first[r + 1]`."""

    op: Int64
    argument: Int64
    first: Int64


class Messages(NamedTuple):
    """All payloads of one phase, source and target are one message of `size` bytes.

    Ordered by phase, distance from source to target, and source: where messages queue, the smaller
    number goes first. So, in every phase, a rank serves its neighbours first, and ranks do not all
    send to the same one.
    """

    phase: Int64
    source: Int64
    target: Int64
    size: Float64


class Flow(NamedTuple):
    """`work` is the seconds of every instruction on a rank of speed 1: packing (LAUNCH), unpacking
    (WAIT) or computing. `tile_seconds` is that of all tiles together, kernel calls not included."""

    num_ranks: int
    num_phases: int
    programs: Programs
    work: Float64
    messages: Messages
    tile_seconds: float


class Payloads(NamedTuple):
    """Everything that travels, piece by piece, int64[payloads] each."""

    phase: Int64
    source: Int64
    target: Int64
    size: Int64


class Loads(NamedTuple):
    """Seconds of the tiles of every rank and division, their kernel calls, and what the rows of
    these add (None: nothing)."""

    seconds: Float64
    calls: Int64
    more: Float64 | None = None

    @staticmethod
    def of(
        cell: Int64,
        group: Int64,
        seconds: Float64,
        ranks: int,
        divisions: int,
        more: Float64 | None = None,
    ) -> "Loads":
        """From tiles: `cell` is rank × divisions + division; one call per cell and head group.
        `more` has seconds by cell."""
        num_cells, num_groups = ranks * divisions, int(group.max(initial=0)) + 1
        called: Bool = np.zeros((num_cells, num_groups), np.bool_)
        called[cell, group] = True
        total: Float64 = np.bincount(cell, seconds, num_cells).astype(np.float64)
        return Loads(
            total.reshape(ranks, divisions),
            called.sum(axis=1, dtype=np.int64).reshape(ranks, divisions),
            None if more is None else more.reshape(ranks, divisions),
        )


def join_messages(payloads: Payloads, num_ranks: int) -> Messages:
    """One message for the payloads of a phase, source and target."""
    distance = (payloads.target - payloads.source) % num_ranks
    key = (payloads.phase * num_ranks + distance) * num_ranks + payloads.source
    key, size = _sum_runs(key, payloads.size)  # schedules and plans list them side by side
    order = np.argsort(key)
    key, size = _sum_runs(key[order], size[order])
    source, target = key % num_ranks, (key + key // num_ranks) % num_ranks
    return Messages(key // num_ranks**2, source, target, size.astype(np.float64))


def _sum_runs(key: Int64, size: Int64) -> tuple[Int64, Int64]:
    """Adds up neighbours with the same key: keys 4 4 7, sizes 1 2 3 give 4 7 and 3 3."""
    first = np.flatnonzero(np.diff(key, prepend=-1))
    return key[first], np.add.reduceat(size, first) if len(first) else size


def make_flow(
    loads: Loads, messages: Messages, programs: Programs, num_phases: int, cost: CostModel
) -> Flow:
    num_ranks = len(loads.calls)
    rank = np.repeat(np.arange(num_ranks), np.diff(programs.first))
    work = np.zeros(len(rank))
    copied = {Op.LAUNCH: messages.source, Op.WAIT: messages.target}
    for op, end in copied.items():
        cell = end * num_phases + messages.phase
        size = np.bincount(cell, messages.size, num_ranks * num_phases)
        chosen = programs.op == op
        at = rank[chosen] * num_phases + programs.argument[chosen]
        work[chosen] = cost.copy_seconds(size[at])
    chosen = programs.op == Op.COMPUTE
    seconds = loads.seconds + cost.call_seconds(loads.calls)
    if loads.more is not None:
        seconds = seconds + loads.more
    work[chosen] = seconds[rank[chosen], programs.argument[chosen]]
    total = float(loads.seconds.sum())
    return Flow(num_ranks, num_phases, programs, work, messages, total)


def with_compute(flow: Flow, seconds: Float64) -> Flow:
    """The flow with other seconds of computation, float64[ranks, divisions]."""
    programs = flow.programs
    rank = np.repeat(np.arange(flow.num_ranks), np.diff(programs.first))
    chosen, work = programs.op == Op.COMPUTE, flow.work.copy()
    work[chosen] = seconds[rank[chosen], programs.argument[chosen]]
    return flow._replace(work=work)
