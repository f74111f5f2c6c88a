"""Cuts of one sequence's tiles: a band of rows (or columns) against the rest.

With a = 0 the band [a, b) is a straight cut, otherwise a sandwich, which is what zigzag is. Cutting
rows costs the KV bytes of the columns that both sides then need:

    A A . .        band of rows 1-2 against rows 0 and 3, causal: columns 0, 1 and 2 are needed on
    B B . .        both sides, column 3 only by A
    B B B .
    A A A A

Compiled functions take plain arrays and write results into their arguments: handing on tuples of
arrays costs reference counts at run time and most of the time to compile.
"""

from dyncp.arrays import Float64, Int32, Int64
from dyncp.compiled import inner

# Start rows tried per cut.
MAX_STARTS = 48


@inner
def sum_lines(
    work: Float64,
    base: int,
    stride: int,
    tokens: Float64,
    lines: Int64,
    across: Int64,
    by_rows: bool,
    running: Float64,
    seen: Int32,
) -> None:
    """Sums of a piece's tiles before each of its rows (or columns) `lines`, blocks of a sequence
    whose matrix starts at `base`: `running` [lines + 1, 2] has work and the tokens of blocks whose
    diagonal tile is in the piece, `seen` [lines + 1, across] the lines that have a tile in a
    crossing line."""
    step, other = (stride, 1) if by_rows else (1, stride)
    running[0, 0] = running[0, 1] = 0.0
    for j in range(len(across)):
        seen[0, j] = 0
    for i in range(len(lines)):
        total, owned, start = 0.0, 0.0, base + lines[i] * step
        for j in range(len(across)):
            weight = work[start + across[j] * other]
            total += weight
            seen[i + 1, j] = seen[i, j] + (1 if weight > 0 else 0)
            if lines[i] == across[j]:
                owned = tokens[lines[i]]
        running[i + 1, 0] = running[i, 0] + total
        running[i + 1, 1] = running[i, 1] + owned


@inner
def best_band(
    running: Float64,
    seen: Int32,
    size: Float64,
    count: int,
    room: Float64,
    penalty: float,
    found: Int64,
) -> float:
    """Bytes of the cheapest band of `count` lines, infinite where there is none; `found` gets its
    first and end line.

    Its work and tokens should lie in room[what, 0] to room[what, 1]; missing that by the piece's
    whole load costs `penalty` in the choice."""
    best, best_bytes = 1e300, 1e300
    step = max(1, count // MAX_STARTS)
    for a in range(0, count, step):
        tried = -1
        for aim in range(3):
            target = running[a, 0] + room[0, 0] + (room[0, 1] - room[0, 0]) * aim / 2
            nearest = _first_at_least(running, count, target)
            for b in range(nearest - 1, nearest + 1):
                if b <= a or b > count or b <= tried or b - a == count:
                    continue
                tried = b
                missed = miss(running, count, a, b, room, penalty)
                if missed >= best:
                    continue
                cost = _crossing_bytes(seen, size, count, a, b, best - missed)
                if cost + missed < best:
                    best, best_bytes = cost + missed, cost
                    found[0], found[1] = a, b
    return best_bytes


@inner
def miss(running: Float64, count: int, a: int, b: int, room: Float64, penalty: float) -> float:
    """What a band costs for missing its room."""
    missed = 0.0
    for what in range(2):
        value, total = running[b, what] - running[a, what], running[count, what]
        if total > 0:
            missed += max(0.0, room[what, 0] - value, value - room[what, 1]) / total
    return missed * penalty


@inner
def _first_at_least(running: Float64, count: int, target: float) -> int:
    """numpy's searchsorted on the work, which takes half a second more to compile."""
    low, high = 0, count + 1
    while low < high:
        middle = (low + high) // 2
        if running[middle, 0] < target:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _crossing_bytes(seen: Int32, size: Float64, count: int, a: int, b: int, enough: float) -> float:
    """Bytes of the crossing lines that band and rest both need; stops counting at `enough`."""
    cost = 0.0
    for j in range(len(size)):
        inside = seen[b, j] - seen[a, j]
        if 0 < inside < seen[count, j]:
            cost += size[j]
            if cost >= enough:
                break
    return cost
