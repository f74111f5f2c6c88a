"""Levels blocks between ranks: moves and swaps off overloaded ranks.

A block takes its tiles with it, so a move changes the work and the tokens of two ranks, and which
ranks need which data: every rank that needs an edge gets it once, and every node gets it over
its border once.
"""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int32, Int64, starts_of
from dyncp.compiled import compiled, inner
from dyncp.placement.problem import Cells, Problem, border_price
from dyncp.topology import Topology


class TileNeeds(NamedTuple):
    """What the tiles that run with each block need besides it: edges of other blocks, key sides 0
    to B - 1 and query sides B to 2B - 1, with the bytes that each costs per rank."""

    start: Int64  # [blocks + 1] into edges
    edges: Int64
    size: Float64  # [2 × blocks]
    load: Float64  # [blocks, 2] work of the tiles, tokens of the block


def find_needs(problem: Problem, cells: Cells, heavy: Bool) -> TileNeeds:
    """Tiles run with their query block, those of `heavy` query blocks with their key block."""
    blocks, by_key = len(problem.tokens), heavy[cells.q_block]
    home = np.where(by_key, cells.k_block, cells.q_block)
    edge = np.where(by_key, cells.q_block + blocks, cells.k_block)
    foreign = cells.q_block != cells.k_block
    order = np.argsort(home[foreign], kind="stable")
    work = np.bincount(home, problem.work[cells.cell], blocks)
    return TileNeeds(
        starts_of(np.bincount(home[foreign], minlength=blocks)),
        edge[foreign][order],
        np.concatenate([problem.kv_bytes, problem.q_bytes]),
        np.stack([work, problem.tokens], axis=1),
    )


_EPSILON = 1e-9
# Ranks of other nodes that an overfull rank may give to: those with most scratch.
OUTSIDERS = 4
# Of all moves and swaps, those that relieve most are priced.
PRICED = 16


class BlockOwners(NamedTuple):
    """Blocks with their ranks, and what their tiles need (see TileNeeds); `users`, `inside` and
    `used` are derived from `rank` and updated with it.

    `aim` is what levelling tries to reach, `limit` what no move may violate: [ranks, 2], work and
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


def own_blocks(needs: TileNeeds, topology: Topology, caps: Float64, rank: Int64) -> BlockOwners:
    """Blocks with these ranks; `caps` are the work and tokens that a rank may have."""
    edges, ranks = len(needs.size), topology.num_ranks
    limit = np.maximum(np.tile(caps, (ranks, 1)), 1e-9)
    owned = BlockOwners(
        *needs,
        border=border_price(topology),
        per_node=topology.ranks_per_node,
        aim=limit.copy(),
        limit=limit,
        rank=rank,
        users=np.zeros((edges, ranks), np.int32),
        inside=np.zeros((edges, topology.nodes), np.int32),
        used=np.zeros((ranks, 2)),
    )
    count_users(owned)
    return owned


@compiled
def count_users(owned: BlockOwners) -> None:
    """Fills users, inside and used from the blocks' ranks."""
    for b in range(len(owned.rank)):
        r = owned.rank[b]
        owned.used[r, 0] += owned.load[b, 0]
        owned.used[r, 1] += owned.load[b, 1]
        _shift(owned.start, owned.edges, owned.users, b, -1, r)
        _shift(owned.start, owned.edges, owned.inside, b, -1, r // owned.per_node)


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
def _cost(owned: BlockOwners, b: int, r: int, s: int) -> float:
    change = _change(owned.start, owned.edges, owned.size, owned.users, b, r, s)
    m, n = r // owned.per_node, s // owned.per_node
    if m != n:
        change += owned.border * _change(
            owned.start, owned.edges, owned.size, owned.inside, b, m, n
        )
    return change


@inner
def _move(owned: BlockOwners, b: int, s: int) -> None:
    r = owned.rank[b]
    for what in range(2):
        owned.used[r, what] -= owned.load[b, what]
        owned.used[s, what] += owned.load[b, what]
    _shift(owned.start, owned.edges, owned.users, b, r, s)
    m, n = r // owned.per_node, s // owned.per_node
    if m != n:
        _shift(owned.start, owned.edges, owned.inside, b, m, n)
    owned.rank[b] = s


@inner
def _share(used: Float64, aim: Float64, r: int) -> float:
    return float(max(used[r, 0] / aim[r, 0], used[r, 1] / aim[r, 1]))


@inner
def _over(used: Float64, aim: Float64, r: int, work: float, tokens: float) -> float:
    """By how much a rank misses its aims with this much more work and tokens."""
    over_work = max(0.0, (used[r, 0] + work) / aim[r, 0] - 1.0)
    return float(over_work + max(0.0, (used[r, 1] + tokens) / aim[r, 1] - 1.0))


@inner
def _violates(used: Float64, limit: Float64, r: int, work: float, tokens: float) -> bool:
    """Whether the extra load would violate a limit, or violate it further."""
    if work > 0 and used[r, 0] + work > limit[r, 0] * (1 + _EPSILON):
        return True
    return tokens > 0 and used[r, 1] + tokens > limit[r, 1] * (1 + _EPSILON)


@inner
def _find_partners(owned: BlockOwners, r: int, between: bool, partner: Int64) -> int:
    """Ranks that r may give to: its node's, and the emptiest of the others."""
    count = 0
    first = r // owned.per_node * owned.per_node
    for s in range(first, first + owned.per_node):
        if s != r:
            partner[count] = s
            count += 1
    for _ in range(OUTSIDERS if between else 0):
        best, least = -1, np.inf
        for s in range(len(owned.used)):
            known = first <= s < first + owned.per_node
            for i in range(count):
                known = known or partner[i] == s
            if not known and _share(owned.used, owned.aim, s) < least:
                best, least = s, _share(owned.used, owned.aim, s)
        if best < 0:
            break
        partner[count] = best
        count += 1
    return count


@inner
def _find_exchanges(
    owned: BlockOwners,
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
    load, used, aim, limit = owned.load, owned.used, owned.aim, owned.limit
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
                if _violates(used, limit, s, work, tokens):
                    continue
                if _violates(used, limit, r, -work, -tokens):
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
def _cheapest(owned: BlockOwners, r: int, found: Int64, relief: Float64, size: int) -> int:
    """Which of the exchanges costs the fewest bytes per relief."""
    unit = 1.0
    for e in range(len(owned.size)):
        unit += _EPSILON * owned.size[e]
    best, best_at = np.inf, -1
    for at in range(size):
        s, cost = found[at, 1], 0.0
        for back in range(2):  # one call takes half as long to compile as two
            b = found[at, 2 * back]
            if b >= 0:
                cost += _cost(owned, b, s if back else r, r if back else s)
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


class Scratch(NamedTuple):
    """Arrays of one step of levelling: ranks that may get blocks, the blocks of every rank, and the
    best exchanges with their reliefs; `done` marks ranks that nothing can be done for. They are
    made in Python: making them in compiled code takes a second to compile."""

    partner: Int64
    members: Int64
    first: Int64
    found: Int64
    relief: Float64
    done: Bool


def level(owned: BlockOwners, max_moves: int, between: bool) -> None:
    """Moves or swaps blocks off the rank that misses its aims most; `between` nodes too."""
    ranks = len(owned.used)
    scratch = Scratch(
        np.empty(owned.per_node + OUTSIDERS, np.int64),
        np.empty(len(owned.rank), np.int64),
        np.empty(ranks + 1, np.int64),
        np.empty((PRICED, 3), np.int64),
        np.empty(PRICED),
        np.zeros(ranks, np.bool_),
    )
    _level(owned, scratch, max_moves, between)


@compiled
def _level(owned: BlockOwners, scratch: Scratch, max_moves: int, between: bool) -> None:
    ranks, partner, members, first = (
        len(owned.used),
        scratch.partner,
        scratch.members,
        scratch.first,
    )
    found, relief, done = scratch.found, scratch.relief, scratch.done
    for _ in range(max_moves):
        r, full = -1, 1.0 + _EPSILON
        for s in range(ranks):
            if not done[s] and _share(owned.used, owned.aim, s) > full:
                r, full = s, _share(owned.used, owned.aim, s)
        if r < 0:
            return
        count = _find_partners(owned, r, between, partner)
        _list_members(owned.rank, members, first)
        size = _find_exchanges(owned, r, partner, count, members, first, found, relief)
        if size == 0:
            done[r] = True
            continue
        at = _cheapest(owned, r, found, relief, size)
        s = found[at, 1]
        for back in range(2):
            if found[at, 2 * back] >= 0:
                _move(owned, found[at, 2 * back], r if back else s)
        done[s] = False
