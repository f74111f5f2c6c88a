"""Levels blocks between ranks: moves and swaps off overfull ranks.

A block takes its tiles with it, so a move changes the work and the tokens of two ranks, and which
ranks need which data: every rank that needs an edge gets it once, and every node gets it over
its border once.
"""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int32, Int64, starts_of
from dyncp.compiled import compiled, inner
from dyncp.placement.problem import HEAVY, Cells, Problem, find_cells
from dyncp.placement.problem import fold as fold_cells
from dyncp.topology import Topology

# Homes: every tile runs where one of its two blocks lives, its home.
#
# Usually that is the query block, so that only keys travel. A row that is too heavy for one rank
# (the last rows of causal blockwise attend everything) is computed by the owners of its keys
# instead; then its queries travel to them and partial outputs come back.


class Homes(NamedTuple):
    """The cells of `Problem.work` that have work, ordered: their index, query and key block, and
    whether the key block is home."""

    cell: Int64
    q_block: Int64
    k_block: Int64
    by_key: Bool


def find_homes(problem: Problem, num_ranks: int) -> Homes:
    cells = find_cells(problem)
    by_row = np.bincount(cells.q_block, problem.work[cells.cell], len(problem.tokens))
    heavy = by_row > HEAVY * problem.work.sum() / num_ranks
    return Homes(*cells, heavy[cells.q_block])


def fold(problem: Problem, homes: Homes) -> Problem:
    """The problem with the work of every cell in the row of its home: cells whose home is the key
    block add to that block's diagonal."""
    return fold_cells(problem, Cells(homes.cell, homes.q_block, homes.k_block), homes.by_key)


class Needs(NamedTuple):
    """What the tiles of each home block need besides it: edges of other blocks, key sides 0 to
    B - 1 and query sides B to 2B - 1, with the bytes that each costs per rank."""

    start: Int64  # [blocks + 1] into edges
    edges: Int64
    size: Float64  # [2 × blocks]
    work: Float64  # [blocks] of the tiles


def find_needs(problem: Problem, homes: Homes) -> Needs:
    blocks = len(problem.tokens)
    home = np.where(homes.by_key, homes.k_block, homes.q_block)
    edge = np.where(homes.by_key, homes.q_block + blocks, homes.k_block)
    foreign = np.where(homes.by_key, homes.q_block, homes.k_block) != home
    order = np.argsort(home[foreign], kind="stable")
    counts = np.bincount(home[foreign], minlength=blocks)
    return Needs(
        starts_of(counts),
        edge[foreign][order],
        np.concatenate([problem.kv_bytes, problem.q_bytes]),
        np.bincount(home, problem.work[homes.cell], blocks).astype(np.float64),
    )


_EPSILON = 1e-9
# Ranks of other nodes that an overfull rank may give to: those with most room.
OUTSIDERS = 4
# Of all moves and swaps, those that relieve most are priced.
PRICED = 16


class Rows(NamedTuple):
    """Blocks with what their tiles need (see homes.py). Below `rank` stands what changes with it.

    `aim` is what levelling tries to reach, `limit` what no move may break: [ranks, 2], work and
    tokens."""

    start: Int64  # [blocks + 1] into edges
    edges: Int64
    size: Float64  # [edges] bytes per rank that gets them
    load: Float64  # [blocks, 2] work and tokens
    border: float  # what a byte over a node's border costs on top
    per_node: int  # ranks of a node
    aim: Float64
    limit: Float64
    rank: Int64  # [blocks]
    users: Int32  # [edges, ranks] blocks that need the edge there, and its owner
    inside: Int32  # [edges, nodes] the same per node
    used: Float64  # [ranks, 2] work and tokens


def make_rows(
    problem: Problem, needs: Needs, topology: Topology, caps: Float64, rank: Int64
) -> Rows:
    edges, ranks = len(needs.size), topology.num_ranks
    limit = np.maximum(np.tile(caps, (ranks, 1)), 1e-9)
    rows = Rows(
        start=needs.start,
        edges=needs.edges,
        size=needs.size,
        load=np.stack([needs.work, problem.tokens], axis=1),
        border=_border(topology),
        per_node=topology.ranks_per_node,
        aim=limit.copy(),
        limit=limit,
        rank=rank,
        users=np.zeros((edges, ranks), np.int32),
        inside=np.zeros((edges, topology.nodes), np.int32),
        used=np.zeros((ranks, 2)),
    )
    count_users(rows)
    return rows


def _border(topology: Topology) -> float:
    if topology.nodes == 1:
        return 0.0
    return topology.intra.bandwidth * topology.ranks_per_node / topology.inter.bandwidth


@compiled
def count_users(rows: Rows) -> None:
    """Fills users, inside and used from the blocks' ranks."""
    for b in range(len(rows.rank)):
        r = rows.rank[b]
        rows.used[r, 0] += rows.load[b, 0]
        rows.used[r, 1] += rows.load[b, 1]
        _shift(rows.start, rows.edges, rows.users, b, -1, r)
        _shift(rows.start, rows.edges, rows.inside, b, -1, r // rows.per_node)


@inner
def _shift(start: Int64, edges: Int64, counts: Int32, b: int, r: int, s: int) -> None:
    """Block b no longer counts at place r (-1: nowhere), but at place s."""
    blocks = len(start) - 1
    for i in range(start[b] - 2, start[b + 1]):
        e = edges[i] if i >= start[b] else b + (start[b] - 1 - i) * blocks
        counts[e, s] += 1
        if r >= 0:
            counts[e, r] -= 1


@inner
def _change(
    start: Int64, edges: Int64, size: Float64, counts: Int32, b: int, r: int, s: int
) -> float:
    """Bytes more when block b moves from place r to place s (ranks, or nodes)."""
    blocks, change = len(start) - 1, 0.0
    for i in range(start[b] - 2, start[b + 1]):
        # Its own two edges come with it.
        e = edges[i] if i >= start[b] else b + (start[b] - 1 - i) * blocks
        if counts[e, s] == 0:
            change += size[e]
        if counts[e, r] == 1:
            change -= size[e]
    return change


@inner
def _cost(rows: Rows, b: int, r: int, s: int) -> float:
    change = _change(rows.start, rows.edges, rows.size, rows.users, b, r, s)
    m, n = r // rows.per_node, s // rows.per_node
    if m != n:
        change += rows.border * _change(rows.start, rows.edges, rows.size, rows.inside, b, m, n)
    return change


@inner
def _move(rows: Rows, b: int, s: int) -> None:
    r = rows.rank[b]
    for what in range(2):
        rows.used[r, what] -= rows.load[b, what]
        rows.used[s, what] += rows.load[b, what]
    _shift(rows.start, rows.edges, rows.users, b, r, s)
    m, n = r // rows.per_node, s // rows.per_node
    if m != n:
        _shift(rows.start, rows.edges, rows.inside, b, m, n)
    rows.rank[b] = s


@inner
def _share(used: Float64, aim: Float64, r: int) -> float:
    return float(max(used[r, 0] / aim[r, 0], used[r, 1] / aim[r, 1]))


@inner
def _over(used: Float64, aim: Float64, r: int, work: float, tokens: float) -> float:
    """By how much a rank misses its aims with this much more work and tokens."""
    over_work = max(0.0, (used[r, 0] + work) / aim[r, 0] - 1.0)
    return float(over_work + max(0.0, (used[r, 1] + tokens) / aim[r, 1] - 1.0))


@inner
def _breaks(used: Float64, limit: Float64, r: int, work: float, tokens: float) -> bool:
    """Whether that much more would break a limit, or miss it by more than now."""
    if work > 0 and used[r, 0] + work > limit[r, 0] * (1 + _EPSILON):
        return True
    return tokens > 0 and used[r, 1] + tokens > limit[r, 1] * (1 + _EPSILON)


@inner
def _find_partners(rows: Rows, r: int, between: bool, partner: Int64) -> int:
    """Ranks that r may give to: its node's, and the emptiest of the others."""
    count = 0
    first = r // rows.per_node * rows.per_node
    for s in range(first, first + rows.per_node):
        if s != r:
            partner[count] = s
            count += 1
    for _ in range(OUTSIDERS if between else 0):
        best, least = -1, np.inf
        for s in range(len(rows.used)):
            known = first <= s < first + rows.per_node
            for i in range(count):
                known = known or partner[i] == s
            if not known and _share(rows.used, rows.aim, s) < least:
                best, least = s, _share(rows.used, rows.aim, s)
        if best < 0:
            break
        partner[count] = best
        count += 1
    return count


@inner
def _find_exchanges(
    rows: Rows,
    r: int,
    partner: Int64,
    count: int,
    members: Int64,
    first: Int64,
    found: Int64,
    relief: Float64,
) -> int:
    """The moves and swaps off rank r that relieve most, one row each: block, rank, block back (-1:
    none). Returns how many."""
    load, used, aim, limit = rows.load, rows.used, rows.aim, rows.limit
    over_r = _over(used, aim, r, 0.0, 0.0)
    size = 0
    for x in range(first[r], first[r + 1]):
        b = members[x]
        for i in range(count):
            s = partner[i]
            before = over_r + _over(used, aim, s, 0.0, 0.0)
            for y in range(first[s] - 1, first[s + 1]):
                c = members[y] if y >= first[s] else -1
                work = load[b, 0] - (load[c, 0] if c >= 0 else 0.0)
                tokens = load[b, 1] - (load[c, 1] if c >= 0 else 0.0)
                after = _over(used, aim, r, -work, -tokens) + _over(used, aim, s, work, tokens)
                gain = before - after
                if gain <= 1e-6 or (size == len(relief) and gain <= relief[size - 1]):
                    continue
                if _breaks(used, limit, s, work, tokens):
                    continue
                if _breaks(used, limit, r, -work, -tokens):
                    continue
                at = min(size, len(relief) - 1)
                while at > 0 and relief[at - 1] < gain:
                    relief[at] = relief[at - 1]
                    found[at, 0], found[at, 1], found[at, 2] = (
                        found[at - 1, 0],
                        found[at - 1, 1],
                        found[at - 1, 2],
                    )
                    at -= 1
                relief[at] = gain
                found[at, 0], found[at, 1], found[at, 2] = b, s, c
                size = min(size + 1, len(relief))
    return size


@inner
def _cheapest(rows: Rows, r: int, found: Int64, relief: Float64, size: int) -> int:
    """Which of the exchanges costs the fewest bytes per relief."""
    unit = 1.0
    for e in range(len(rows.size)):
        unit += _EPSILON * rows.size[e]
    best, best_at = np.inf, -1
    for at in range(size):
        s, cost = found[at, 1], 0.0
        for back in range(2):  # one call takes half as long to compile as two
            b = found[at, 2 * back]
            if b >= 0:
                cost += _cost(rows, b, s if back else r, r if back else s)
        score = (max(cost, 0.0) + unit) / relief[at]
        if score < best:
            best, best_at = score, at
    return best_at


@inner
def _list_members(rank: Int64, members: Int64, first: Int64) -> None:
    """Blocks of every rank: members[first[r] : first[r + 1]]."""
    for r in range(len(first)):
        first[r] = 0
    for b in range(len(rank)):
        first[rank[b] + 1] += 1
    for r in range(len(first) - 1):
        first[r + 1] += first[r]
    for b in range(len(rank)):
        members[first[rank[b]]] = b
        first[rank[b]] += 1
    for r in range(len(first) - 1, 0, -1):
        first[r] = first[r - 1]
    first[0] = 0


class Room(NamedTuple):
    """Room for one step of levelling: ranks that may get blocks, the blocks of every rank, and the
    best exchanges with their reliefs; `done` marks ranks that nothing can be done for. Making these
    arrays in compiled code takes a second to compile."""

    partner: Int64
    members: Int64
    first: Int64
    found: Int64
    relief: Float64
    done: Bool


def level(rows: Rows, max_moves: int, between: bool) -> None:
    """Moves or swaps blocks off the rank that misses its aims most; `between` nodes too."""
    ranks = len(rows.used)
    room = Room(
        np.empty(rows.per_node + OUTSIDERS, np.int64),
        np.empty(len(rows.rank), np.int64),
        np.empty(ranks + 1, np.int64),
        np.empty((PRICED, 3), np.int64),
        np.empty(PRICED),
        np.zeros(ranks, np.bool_),
    )
    _level(rows, room, max_moves, between)


@compiled
def _level(rows: Rows, room: Room, max_moves: int, between: bool) -> None:
    ranks, partner, members, first = len(rows.used), room.partner, room.members, room.first
    found, relief, done = room.found, room.relief, room.done
    for _ in range(max_moves):
        r, full = -1, 1.0 + _EPSILON
        for s in range(ranks):
            if not done[s] and _share(rows.used, rows.aim, s) > full:
                r, full = s, _share(rows.used, rows.aim, s)
        if r < 0:
            return
        count = _find_partners(rows, r, between, partner)
        _list_members(rows.rank, members, first)
        size = _find_exchanges(rows, r, partner, count, members, first, found, relief)
        if size == 0:
            done[r] = True
            continue
        at = _cheapest(rows, r, found, relief, size)
        s = found[at, 1]
        for back in range(2):
            if found[at, 2 * back] >= 0:
                _move(rows, found[at, 2 * back], r if back else s)
        done[s] = False
