"""Flow: what all ranks do in one direction of one attention layer, as flat arrays."""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.cost import CostModel
from dyncp.cost.row_work import Moved, RowWork, Sent, Touched
from dyncp.plan import Op

# What programs begin and end with, where row work is priced: copying in, merging and copying out.
START, END = len(Op), len(Op) + 1


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
    (WAIT), computing, and what there is to do at START and END. `tile_seconds` is that of all tiles
    together, kernel calls not included. The host needs `host_seconds` to issue an instruction;
    computing takes `slowdown` times longer while messages come in or go out."""

    num_ranks: int
    num_phases: int
    programs: Programs
    work: Float64
    messages: Messages
    tile_seconds: float
    host_seconds: float = 0.0
    slowdown: float = 1.0

    @property
    def step_rank(self) -> Int64:
        """Rank of every instruction."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.programs.first))

    @property
    def call_seconds(self) -> Float64:
        """Seconds of every rank's call if it never waited, for messages or for the host."""
        total = np.bincount(self.step_rank, self.work, self.num_ranks)
        return total.astype(np.float64)


class Loads(NamedTuple):
    """Seconds of the tiles of every rank and division, their kernel calls, what the rows of these
    add (None: nothing), and the query blocks that calls meet (None: not asked for)."""

    seconds: Float64
    calls: Int64
    more: Float64 | None = None
    touched: Touched | None = None

    @staticmethod
    def of(
        cell: Int64,
        group: Int64,
        seconds: Float64,
        ranks: int,
        divisions: int,
        more: Float64 | None = None,
        touched: Touched | None = None,
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
            touched,
        )


def join_messages(payloads: Sent, num_ranks: int) -> Messages:
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
    loads: Loads, messages: Messages, programs: Programs, rows: Moved, cost: CostModel
) -> Flow:
    """`rows` has the seconds of row work (see `row_seconds`)."""
    num_ranks, num_phases = rows.launch.shape
    if cost.knows_launches:
        programs = _with_ends(programs)
    rank = np.repeat(np.arange(num_ranks), np.diff(programs.first))
    work = np.zeros(len(rank))
    seconds = loads.seconds + cost.call_seconds(loads.calls)
    seconds += cost.profile.launch_seconds * loads.calls
    if loads.more is not None:
        seconds += loads.more
    start, end = rows.start[:, None], rows.end[:, None]
    by_op = {
        Op.LAUNCH: rows.launch,
        Op.WAIT: rows.wait,
        Op.COMPUTE: seconds,
        START: start,
        END: end,
    }
    for op, table in by_op.items():
        chosen = programs.op == op
        work[chosen] = table[rank[chosen], programs.argument[chosen]]
    total = float(loads.seconds.sum())
    host, slowdown = cost.host_seconds, cost.profile.overlap_slowdown
    return Flow(num_ranks, num_phases, programs, work, messages, total, host, slowdown)


def row_seconds(rows: RowWork, sent: Sent, touched: Touched | None, cost: CostModel) -> Moved:
    """Seconds of row work at every point; where the profile knows no launches, those of packing and
    unpacking messages alone."""
    if cost.knows_launches:
        return rows.moved(sent, touched).seconds(cost)
    nothing = np.zeros(rows.num_ranks)
    launch, wait = (
        cost.copy_seconds(rows.by_phase(end, sent, sent.size)) for end in (sent.source, sent.target)
    )
    return Moved(nothing, launch, wait, nothing)


def _with_ends(programs: Programs) -> Programs:
    """Programs that begin with START and end with END."""
    op, argument = (
        np.insert(
            np.insert(column, programs.first[1:], behind),
            programs.first[:-1] + np.arange(len(programs.first) - 1),
            before,
        )
        for column, before, behind in (
            (programs.op, START, END),
            (programs.argument, 0, 0),
        )
    )
    return Programs(op, argument, programs.first + 2 * np.arange(len(programs.first)))


def with_compute(flow: Flow, seconds: Float64) -> Flow:
    """The flow with other seconds of computation, float64[ranks, divisions]."""
    programs, rank = flow.programs, flow.step_rank
    chosen, work = programs.op == Op.COMPUTE, flow.work.copy()
    work[chosen] = seconds[rank[chosen], programs.argument[chosen]]
    return flow._replace(work=work)
