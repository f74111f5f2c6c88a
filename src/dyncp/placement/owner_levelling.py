"""Levels blocks between ranks: moves and swaps take blocks off overloaded ranks.

A block takes its tiles with it, so a move changes the work and the tokens of two ranks. Each step
makes the move or swap with the greatest relief. Choosing the one with the fewest bytes among the 16
best gave steps just as long (0.999 times, 160 cases).
"""

from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.compiled import compiled, inner
from dyncp.topology import Topology

_EPSILON = 1e-9
# An overloaded rank may give to this many ranks of other nodes, the emptiest first. With 1, steps
# with limits take 1.007 times as long.
OUTSIDERS = 4


class BlockOwners(NamedTuple):
    """Blocks with their ranks. `used` is derived from `rank` and updated with it.

    Levelling tries to reach `aim`, and no move may exceed `limit`: work and tokens, [ranks, 2].
    """

    load: Float64  # [blocks, 2] work of the block's tiles, its tokens
    per_node: int  # ranks of a node
    aim: Float64
    limit: Float64
    rank: Int64  # [blocks]
    used: Float64  # [ranks, 2] work and tokens


def own_blocks(load: Float64, topology: Topology, caps: Float64, rank: Int64) -> BlockOwners:
    """Blocks with these loads and ranks; a rank may have `caps` work and tokens."""
    ranks = topology.num_ranks
    limit = np.maximum(np.tile(caps, (ranks, 1)), 1e-9)
    used = np.stack([np.bincount(rank, column, ranks) for column in load.T], axis=1)
    held = used.astype(np.float64)
    return BlockOwners(load, topology.ranks_per_node, limit.copy(), limit, rank, held)


@inner
def _share(used: Float64, aim: Float64, r: int) -> float:
    return float(max(used[r, 0] / aim[r, 0], used[r, 1] / aim[r, 1]))


@inner
def _over(used: Float64, aim: Float64, r: int, work: float, tokens: float) -> float:
    """By how much rank r exceeds its aims with this much more work and tokens."""
    over_work = max(0.0, (used[r, 0] + work) / aim[r, 0] - 1.0)
    return float(over_work + max(0.0, (used[r, 1] + tokens) / aim[r, 1] - 1.0))


@inner
def _violates(used: Float64, limit: Float64, r: int, work: float, tokens: float) -> bool:
    """Whether the extra load would exceed a limit, or exceed it further."""
    if work > 0 and used[r, 0] + work > limit[r, 0] * (1 + _EPSILON):
        return True
    return tokens > 0 and used[r, 1] + tokens > limit[r, 1] * (1 + _EPSILON)


@inner
def _find_partners(owned: BlockOwners, r: int, between: bool, partner: Int64) -> int:
    """Writes the ranks that r may give to: those of its node and, if `between`, the emptiest of the
    others. Returns how many."""
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
def _best_exchange(
    owned: BlockOwners, r: int, partner: Int64, count: int, members: Int64, first: Int64
) -> tuple[int, int, int]:
    """The move or swap off rank r with the greatest relief: its block, the rank that gets it, and
    the block that comes back (-1: none). The first block is -1 if nothing relieves rank r."""
    load, used, aim, limit = owned.load, owned.used, owned.aim, owned.limit
    over_r = _over(used, aim, r, 0.0, 0.0)
    best, found = 1e-6, (-1, -1, -1)
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
                if before - after <= best or _violates(used, limit, s, work, tokens):
                    continue
                if not _violates(used, limit, r, -work, -tokens):
                    best, found = before - after, (b, s, c)
    return found


@inner
def _list_members(rank: Int64, members: Int64, first: Int64) -> None:
    """Writes the blocks of every rank r to members[first[r] : first[r + 1]]."""
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


@inner
def _move(owned: BlockOwners, b: int, s: int) -> None:
    for what in range(2):
        owned.used[owned.rank[b], what] -= owned.load[b, what]
        owned.used[s, what] += owned.load[b, what]
    owned.rank[b] = s


class Scratch(NamedTuple):
    """Arrays that levelling reuses: the ranks that may get blocks, the blocks of every rank, and
    which ranks cannot be relieved (`done`). Python creates them, because creating them in compiled
    code takes a second to compile."""

    partner: Int64
    members: Int64
    first: Int64
    done: Bool


def level(owned: BlockOwners, max_moves: int, between: bool) -> None:
    """Moves or swaps blocks off the rank that exceeds its aims most, `between` nodes too."""
    ranks = len(owned.used)
    scratch = Scratch(
        np.empty(owned.per_node + OUTSIDERS, np.int64),
        np.empty(len(owned.rank), np.int64),
        np.empty(ranks + 1, np.int64),
        np.zeros(ranks, np.bool_),
    )
    _level(owned, scratch, max_moves, between)


@compiled
def _level(owned: BlockOwners, scratch: Scratch, max_moves: int, between: bool) -> None:
    partner, members, first, done = scratch.partner, scratch.members, scratch.first, scratch.done
    for _ in range(max_moves):
        r, full = -1, 1.0 + _EPSILON
        for s in range(len(owned.used)):
            if not done[s] and _share(owned.used, owned.aim, s) > full:
                r, full = s, _share(owned.used, owned.aim, s)
        if r < 0:
            return
        count = _find_partners(owned, r, between, partner)
        _list_members(owned.rank, members, first)
        b, s, c = _best_exchange(owned, r, partner, count, members, first)
        if b < 0:
            done[r] = True
            continue
        _move(owned, b, s)
        if c >= 0:
            _move(owned, c, r)
        done[s] = False
