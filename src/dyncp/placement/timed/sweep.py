"""Sweeps over the parts of all sequences, then over their blocks: each goes where the step is
estimated to be shortest. Only those are tried that are on a rank with a busy resource."""

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.compiled import compiled, inner
from dyncp.placement.timed.estimate import StepEstimate, estimate, seconds
from dyncp.placement.timed.unit import Unit, list_unit, put_unit

# A move has to shorten the estimate by this share, a sweep by that one, or it is the last.
WORTH_MOVE, WORTH_SWEEP = 1e-5, 0.01
# Ranks that are tried: of the same sequence, and the least busy, of all and of the machine.
RELATED, NEAR, FAR = 4, 3, 3
# Sweeping ends when so many edges and resources have been looked at, which takes some 50 ms.
MOST_LOOKED_AT = 6_000_000
# A resource is busy that has this share of the busiest.
HOT = 0.8


# Functions that are called often get arrays rather than the whole estimate: numba takes long to
# compile those with many.
@inner
def _mark_hot(busy: Float64, weight: Float64, per_machine: int, hot: Bool) -> None:
    """Ranks with a busy resource, their own or their machine's."""
    ranks = len(hot)
    machines = ranks // per_machine
    for r in range(ranks):
        hot[r] = False
    for row in range(len(busy)):
        most = 0.0
        for at in range(busy.shape[1]):
            most = max(most, HOT * busy[row, at])
        if most == 0 or weight[row] == 0:
            continue
        for r in range(ranks):
            m = 3 * ranks + r // per_machine
            for at in (r, ranks + r, 2 * ranks + r, m, m + machines):
                if busy[row, at] >= most:
                    hot[r] = True


@inner
def _load(busy: Float64, weight: Float64, s: int) -> float:
    total = 0.0
    for row in range(len(busy)):
        total += weight[row] * busy[row, s]
    return total


@inner
def _find_targets(
    busy: Float64, weight: Float64, span: Int64, block_rank: Int64,
    b: int, r: int, per_machine: int, target: Int64, known: Bool,
) -> int:  # fmt: skip
    """Ranks for a unit of the sequence of block b that is on rank r."""
    ranks = len(known)
    for s in range(ranks):
        known[s] = s == r
    size = 0
    for way in (-1, 1):  # the nearest blocks on other ranks
        c = b + way
        while span[b, 0] <= c < span[b, 1] and size < (2 if way < 0 else RELATED):
            s = block_rank[c]
            if not known[s]:
                known[s] = True
                target[size] = s
                size += 1
            c += way
    home = r // per_machine * per_machine
    for far in range(2):
        for _ in range(FAR if far else NEAR):
            best, least = -1, np.inf
            for s in range(0 if far else home, ranks if far else home + per_machine):
                if not known[s]:
                    load = _load(busy, weight, s)
                    if load < least:
                        best, least = s, load
            if best < 0:
                break
            known[best] = True
            target[size] = best
            size += 1
    return size


@inner
def _fits(held: Float64, most: Float64, more: Float64, s: int) -> bool:
    for what in range(2):
        if more[what] > 0 and held[s, what] + more[what] > most[s, what]:
            return False
    return True


@inner
def _move(
    step: StepEstimate, unit: Unit, r: int, target: Int64, size: int, now: float, power: int
) -> float:
    """Takes the unit where the estimate is least; returns that."""
    best, best_s, at = now * (1 - WORTH_MOVE), r, r
    for i in range(size):
        s = target[i]
        if not _fits(step.held, step.most, unit.held, s):
            continue
        put_unit(step, unit, at, s)
        at = s
        found = seconds(step.busy, step.weight, len(step.slow), power)
        if found < best:
            best, best_s = found, s
    if at != best_s:
        put_unit(step, unit, at, best_s)
    if best_s == r:
        return now
    for i in range(unit.sizes[0]):
        step.tile_rank[unit.tiles[i]] = best_s
    return best


@compiled
def sweep(step: StepEstimate, unit: Unit, most: int, power: int) -> None:
    """Sweeps at most so many times; `unit` is room for one."""
    ranks, spent = len(step.slow), 0
    target = np.empty(RELATED + NEAR + FAR, np.int64)
    hot, known = np.zeros(ranks, np.bool_), np.zeros(ranks, np.bool_)
    done, per_machine = np.zeros(ranks, np.int64), step.sizes[0]
    now = estimate(step, power)
    for _ in range(most):
        before = now
        for single in range(2):
            for r in range(ranks):
                done[r] = -1  # first block of the last sequence whose part was tried
            _mark_hot(step.busy, step.weight, per_machine, hot)
            for b in range(len(step.block_rank)):
                first, end, r = step.span[b, 0], step.span[b, 1], step.block_rank[b]
                alone = end - first == 1 if single else done[r] == first
                if alone or not hot[r] or spent > MOST_LOOKED_AT:
                    continue
                done[r] = first
                list_unit(step, unit, b if single else first, b + 1 if single else end, r)
                size = _find_targets(
                    step.busy, step.weight, step.span, step.block_rank, b, r, per_machine,
                    target, known,
                )  # fmt: skip
                spent += size * (unit.sizes[2] + step.busy.shape[1])
                found = _move(step, unit, r, target, size, now, power)
                if found < now:
                    now = found
                    _mark_hot(step.busy, step.weight, per_machine, hot)
        now = estimate(step, power)  # counted anew, since rounding adds up
        if now > before * (1 - WORTH_SWEEP):
            break
