"""Spreads whole pieces over bins: largest first, then moves and swaps that relieve the fullest."""

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.compiled import compiled, inner

# Only so many of the largest pieces are swapped, so often.
SWAPPED_PIECES, MAX_SWAPS = 96, 60
_EPSILON = 1e-9


def level_all(load: Float64, caps: Float64, bins: int) -> Int64:
    """The bin of every piece; `caps` (work, tokens) are those of a bin."""
    order = np.argsort(-(load / caps).max(axis=1), kind="stable")
    place, used = np.zeros(len(load), np.int64), np.zeros((bins, 2))
    level_pieces(load, order, len(order), -1, used, np.tile(caps, (bins, 1)), place, MAX_SWAPS)
    return place


@compiled
def level_pieces(
    load: Float64,
    order: Int64,
    count: int,
    skip: int,
    used: Float64,
    caps: Float64,
    place: Int64,
    max_swaps: int,
) -> float:
    """Puts every piece but `skip` into the bin that it leaves least full, by the first `count` of
    `order`, adding to `used`; returns by how much the caps are missed, as a share of them.

    `load` is [pieces, 2]: work and tokens; `used` and `caps` are [bins, 2]."""
    for i in range(count):
        piece = order[i]
        if piece == skip:
            continue
        best, least = 0, 1e300
        for b in range(len(caps)):
            share = _share(used, caps, b, load[piece, 0], load[piece, 1])
            if share < least:
                best, least = b, share
        place[piece] = best
        used[best, 0] += load[piece, 0]
        used[best, 1] += load[piece, 1]
    for _ in range(max_swaps):
        if not _relieve(load, order, min(count, SWAPPED_PIECES), skip, used, caps, place):
            break
    missed = 0.0
    for b in range(len(caps)):
        for what in range(2):
            missed += max(0.0, used[b, what] / caps[b, what] - 1.0 - _EPSILON)
    return missed


@inner
def _share(used: Float64, caps: Float64, b: int, work: float, tokens: float) -> float:
    return float(max((used[b, 0] + work) / caps[b, 0], (used[b, 1] + tokens) / caps[b, 1]))


@inner
def _fullest(used: Float64, caps: Float64) -> int:
    full = 0
    for b in range(len(caps)):
        if _share(used, caps, b, 0.0, 0.0) > _share(used, caps, full, 0.0, 0.0):
            full = b
    return full


@inner
def _relieve(
    load: Float64, order: Int64, count: int, skip: int, used: Float64, caps: Float64, place: Int64
) -> bool:
    """The move or swap that leaves the fullest bin and its partner least full, while the fullest
    misses its caps."""
    full = _fullest(used, caps)
    best = _share(used, caps, full, 0.0, 0.0)
    if best <= 1.0 + _EPSILON:
        return False
    best, best_p, best_q, best_b = best - _EPSILON, -1, -1, -1
    for i in range(count):
        p = order[i]
        if p == skip or place[p] != full:
            continue
        for j in range(count):  # p itself stands for a move without a swap
            q = order[j]
            if q == skip or (place[q] == full and q != p):
                continue
            work = load[p, 0] - (load[q, 0] if q != p else 0.0)
            tokens = load[p, 1] - (load[q, 1] if q != p else 0.0)
            left = _share(used, caps, full, -work, -tokens)
            if left >= best:
                continue
            first, last = (place[q], place[q] + 1) if q != p else (0, len(caps))
            for b in range(first, last):
                if b == full:
                    continue
                worse = max(left, _share(used, caps, b, work, tokens))
                if worse < best:
                    best, best_p, best_q, best_b = worse, p, q, b
    if best_p < 0:
        return False
    _move(load, used, place, best_p, best_b)
    if best_q != best_p:
        _move(load, used, place, best_q, full)
    return True


@inner
def _move(load: Float64, used: Float64, place: Int64, p: int, b: int) -> None:
    for what in range(2):
        used[place[p], what] -= load[p, what]
        used[b, what] += load[p, what]
    place[p] = b
