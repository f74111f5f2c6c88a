"""Dynamic schedules: assigns tiles to divisions and transfers to phases.

pace.py decides how many bytes of remote inputs arrive for each division. Blocks of the same node
are ordered by the distance to their owner, so that ranks do not all wait for the same owner first.
Blocks of other nodes are split into equal shares for every pair of owner and node (routes.py has
their routes). That gives every tile the earliest division in which its inputs have arrived. Tiles
without slow inputs then fill the gaps. A partial result goes back as soon as the last tile of its
block on that rank is done.

Owners send all inputs at the start, in the order of the divisions that need them. A relay receives
a block for division d - 1, and passes it on for division d while division d - 1 computes. Results
of division d travel while division d + 1 computes; their sums cross node borders one division
later:

    at the start       inter-node inputs for 1, 2, 3, ...; intra-node inputs for 1, 2, 3, ...
    after division d   inputs that relays received for d + 1 and pass on for d + 2; results to be
                       summed by relays; intra-node results; inter-node results

Results to be summed have a separate phase: relays wait for it early, while owners merge at the end,
in the order of phases.
"""

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import BlockGraph, Direction
from dyncp.placement import Placement
from dyncp.schedule.pace import Load, Pace, fill, filler_order, share_phases
from dyncp.schedule.routes import (
    Crossings,
    Relays,
    Uses,
    Work,
    choose_relays,
    find_crossings,
    find_uses,
    find_work,
    travel_seconds,
)
from dyncp.schedule.schedule import Launches, PhaseKind, Schedule, number_phases

# If inter-node results take less than this share of the computation, they are sent together.
SMALL = 0.2


def build_dynamic_schedule(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    direction: Direction,
    num_divisions: int,
    pace: Pace,
) -> Schedule:
    """Slow inputs arrive in at most `num_divisions` - 1 phases. Relays add one more division, and
    tiles that hide the last results add one or two."""
    topology, ranks = pace.topology, placement.num_ranks
    seconds = pace.cost.graph_tile_seconds(graph, name, direction)
    uses = find_uses(graph, placement, name, direction)
    work = find_work(graph, placement, name, seconds)
    # In static methods owners send directly to every user, as in the original systems.
    crossings = find_crossings(uses, topology, joined=not placement.static)
    load = _load(uses, work, crossings, pace)
    rows = float(graph.blocks.tokens.sum()) / ranks
    least = pace.least_seconds(rows, direction)
    results = bool(uses.result_bytes.any())
    shares = share_phases(load, num_divisions, least, results=results)
    relays, arrives = _route(uses, crossings, shares, pace)
    earliest = np.append(arrives, 0)[work.use].max(axis=0)
    slow = _slow_tiles(work, relays)
    together = load.result_travel < SMALL * (load.local + load.near + load.far)
    late = _late_results(uses, relays, work, slow, earliest)
    if together:
        late |= relays.crosses
    back = np.array(travel_seconds(uses, relays, uses.result_bytes * late, topology))
    if back.sum() < pace.cost.division_seconds(rows, direction):
        back = np.zeros(0)
    elif not len(relays.passed_on):
        back = back.sum(keepdims=True)
    arrivals = _slow_arrivals(uses, relays, load, shares, pace)
    turn = filler_order(pace.cost, graph, name, direction)
    tile_division = fill(earliest, slow, work, arrivals, back, ranks, turn)
    first, last = work.first_and_last(tile_division, len(uses))
    arrives = np.where(relays.straight, first, arrives)
    leaves = _departures(last, relays, int(earliest.max(initial=0)) if together else 0)
    launches = _launches(uses, relays, arrives, leaves)
    return number_phases(tile_division, int(tile_division.max(initial=0)) + 1, launches)


def _load(uses: Uses, work: Work, crossings: Crossings, pace: Pace) -> Load:
    topology, ranks = pace.topology, pace.topology.num_ranks
    far, first = crossings.mark(len(uses)), crossings.firsts
    needs_far = np.append(far, False)[work.use].any(axis=0)
    kinds = (work.local, ~work.local & ~needs_far, needs_far)
    local, close, distant = (float(work.seconds[kind].sum()) / ranks for kind in kinds)
    size = uses.num_bytes.astype(np.float64)
    busiest = max(np.bincount(end[~far], size[~far], 1).max() for end in (uses.rank, uses.owner))
    node = np.bincount(uses.rank[first] // topology.ranks_per_node, size[first], 1).max()
    nic = np.bincount(uses.owner[first] // topology.ranks_per_nic, size[first], 1).max()
    border = max(nic, node / topology.nics) / topology.nic_bandwidth
    back = uses.result_bytes[first].sum() / max(uses.num_bytes[first].sum(), 1)
    inside = float(busiest) / topology.intra.bandwidth
    return Load(local, close, distant, inside, float(border), float(border * back))


def _route(
    uses: Uses, crossings: Crossings, shares: tuple[Float64, Float64], pace: Pace
) -> tuple[Relays, Int64]:
    """The relays, and for every use the division that its block arrives for."""
    topology, first = pace.topology, crossings.firsts
    queue = uses.owner * topology.nodes + uses.rank // topology.ranks_per_node
    turn = _spread(queue[first], (uses.block, uses.head_group, uses.side), uses, first, shares[1])
    relays = choose_relays(uses, crossings, turn, topology)
    arrives = np.zeros(len(uses), np.int64)
    arrives[crossings.order] = np.repeat(turn, np.diff(crossings.start))
    arrives[relays.passed_on] += 1
    near = np.flatnonzero(relays.straight)
    distance = (uses.owner - uses.rank) % topology.num_ranks
    order = (distance, uses.block, uses.head_group, uses.side)
    arrives[near] = _spread(uses.rank[near], order, uses, near, shares[0])
    return relays, arrives


def _spread(
    queue: Int64, order: tuple[Int64, ...], uses: Uses, at: Int64, shares: Float64
) -> Int64:
    """Division of each of the uses `at`: every queue is sorted by `order` and split by cumulative
    shares of its bytes. Pairs of queue and order are distinct."""
    key = queue
    for column in order:
        key = key * (int(column.max(initial=0)) + 1) + column[at]
    by = np.argsort(key)
    size, queue = uses.num_bytes[at[by]].astype(np.float64), queue[by]
    total = np.bincount(queue, size)
    middle = np.cumsum(size) - (np.cumsum(total) - total)[queue] - size / 2
    division = np.empty(len(at), np.int64)
    division[by] = 1 + np.searchsorted(shares[:-1], middle / total[queue])
    return division


def _slow_tiles(work: Work, relays: Relays) -> Bool:
    """Tiles that need a block of another node or, if there are none, any remote block."""
    if relays.crosses.any():
        return np.asarray(np.append(~relays.straight, False)[work.use].any(axis=0))
    return ~work.local


def _slow_arrivals(
    uses: Uses, relays: Relays, load: Load, shares: tuple[Float64, Float64], pace: Pace
) -> Float64:
    """Seconds until the slow inputs of divisions 1, 2, ... have arrived."""
    if not relays.crosses.any():
        return load.near_travel * shares[0]
    times = load.far_travel * shares[1]
    if len(relays.passed_on):
        hop, _ = travel_seconds(uses, relays, uses.num_bytes * (relays.relay >= 0), pace.topology)
        times = np.append(times, times[-1] + hop / len(times))
    return times


def _late_results(uses: Uses, relays: Relays, work: Work, slow: Bool, division: Int64) -> Bool:
    """Uses with results of the last slow tiles, and the relays that send the sums of these."""
    late = np.zeros(len(uses) + 1, np.bool_)
    late[work.use[:, slow & (division == division[slow].max(initial=0))]] = True
    late = late[:-1]
    late[relays.relay[late & (relays.relay >= 0)]] = True
    return late


def _departures(last: Int64, relays: Relays, least: int) -> Int64:
    """Division after which the results of each use are sent: that of its last tile. Results to be
    summed are sent together by all ranks, after division `least` at the earliest, and the sum one
    division later."""
    at, leaves = relays.passed_on, last.copy()
    np.maximum.at(leaves, relays.relay[at], np.maximum(last[at], least) + 1)
    leaves[at] = leaves[relays.relay[at]] - 1
    return leaves


def _launches(uses: Uses, relays: Relays, arrives: Int64, leaves: Int64) -> list[Launches]:
    """Transfers of inputs that arrive for division `arrives`, and of results that are sent after
    division `leaves`."""
    far, passed_on = relays.crosses, relays.relay >= 0
    kinds = PhaseKind
    come = np.select([far, passed_on], [kinds.FAR_INPUT, kinds.PASSED_ON], kinds.NEAR_INPUT)
    go = np.select([far, passed_on], [kinds.FAR_RESULT, kinds.SUMMAND], kinds.NEAR_RESULT)
    division = np.where(passed_on, arrives - 2, arrives)
    what, ends = (uses.head_group, uses.block), (uses.rank, relays.source)
    back = np.flatnonzero(uses.result >= 0)
    results = (column[back] for column in (go, leaves, *ends, uses.result, *what))
    return [Launches(come, division, *ends[::-1], uses.sent, *what), Launches(*results)]
