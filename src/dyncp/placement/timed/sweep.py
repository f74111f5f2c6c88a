"""Sweeps over the parts of all sequences, then over their blocks: each goes where the step is
estimated to be shortest. Only those are tried that are on a rank with a busy resource."""

import numpy as np

from dyncp.arrays import Bool, Int64
from dyncp.compiled import compiled, inner
from dyncp.placement.timed.estimate import StepEstimate, estimate, seconds
from dyncp.placement.timed.unit import Unit, list_unit, make_unit, put_unit, write_tiles

# A move has to shorten the estimate by this share, a sweep by that one, or it is the last.
WORTH_MOVE, WORTH_SWEEP = 1e-5, 0.01
# Ranks that are tried: of the same sequence, and the least busy, of all and of the machine.
RELATED, NEAR, FAR = 4, 3, 3
# Sweeping ends when so many edges and resources have been looked at, which takes some 25 ms.
MOST_LOOKED_AT = 3_000_000
# A resource is busy that has this share of the busiest.
HOT = 0.8


@inner
def _mark_hot(step: StepEstimate, hot: Bool) -> None:
    """Ranks with a busy resource, their own or their machine's."""
    ranks, per_machine = len(step.slow), step.sizes[0]
    machines = ranks // per_machine
    hot[:] = False
    for row in range(len(step.busy)):
        most = step.busy[row].max() * HOT
        if most == 0 or step.weight[row] == 0:
            continue
        for r in range(ranks):
            m = 3 * ranks + r // per_machine
            for at in (r, ranks + r, 2 * ranks + r, m, m + machines):
                if step.busy[row, at] >= most:
                    hot[r] = True


@inner
def _load(step: StepEstimate, s: int) -> float:
    total = 0.0
    for row in range(len(step.busy)):
        total += step.weight[row] * step.busy[row, s]
    return total


@inner
def _find_targets(step: StepEstimate, b: int, r: int, target: Int64, known: Bool) -> int:
    """Ranks for a unit of the sequence of block b that is on rank r."""
    ranks, per_machine = len(step.slow), step.sizes[0]
    known[:] = False
    known[r] = True
    size = 0
    for way in (-1, 1):  # the nearest blocks on other ranks
        c = b + way
        while step.span[b, 0] <= c < step.span[b, 1] and size < (2 if way < 0 else RELATED):
            s = step.block_rank[c]
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
                    load = _load(step, s)
                    if load < least:
                        best, least = s, load
            if best < 0:
                break
            known[best] = True
            target[size] = best
            size += 1
    return size


@inner
def _fits(step: StepEstimate, unit: Unit, s: int) -> bool:
    for what in range(2):
        if unit.held[what] > 0 and step.held[s, what] + unit.held[what] > step.most[s, what]:
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
        if not _fits(step, unit, s):
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
    write_tiles(step, unit, best_s)
    return best


@compiled
def sweep(step: StepEstimate, most: int, power: int) -> None:
    """Sweeps at most so many times."""
    ranks, spent = len(step.slow), 0
    unit, target = make_unit(step), np.empty(RELATED + NEAR + FAR, np.int64)
    hot, known = np.zeros(ranks, np.bool_), np.zeros(ranks, np.bool_)
    now = estimate(step, power)
    for _ in range(most):
        before = now
        for single in range(2):
            done = np.full(ranks, -1)  # first block of the last sequence whose part was tried
            _mark_hot(step, hot)
            for b in range(len(step.block_rank)):
                first, end, r = step.span[b, 0], step.span[b, 1], step.block_rank[b]
                alone = end - first == 1 if single else done[r] == first
                if alone or not hot[r] or spent > MOST_LOOKED_AT:
                    continue
                done[r] = first
                list_unit(step, unit, b if single else first, b + 1 if single else end, r)
                size = _find_targets(step, b, r, target, known)
                spent += size * (unit.sizes[2] + step.busy.shape[1])
                found = _move(step, unit, r, target, size, now, power)
                if found < now:
                    now = found
                    _mark_hot(step, hot)
        now = estimate(step, power)  # counted anew, since rounding adds up
        if now > before * (1 - WORTH_SWEEP):
            break
