"""Events in order of time, and of their key where times are equal: a binary heap in one array.

Entry 0 holds, as its key, how many events there are; the heap starts at entry 1.
"""

from dyncp.compiled import inner
from dyncp.simulate.world import Records


@inner
def push(queue: Records, time: float, key: int) -> None:
    at = queue[0].key + 1
    queue[0].key = at
    while at > 1:
        parent = queue[at // 2]
        if parent.time < time or (parent.time == time and parent.key < key):
            break
        queue[at].time, queue[at].key = parent.time, parent.key
        at //= 2
    queue[at].time, queue[at].key = time, key


@inner
def pop(queue: Records) -> tuple[float, int]:
    first_time, first_key, size = queue[1].time, queue[1].key, queue[0].key
    time, key, at = queue[size].time, queue[size].key, 1
    while 2 * at < size:
        child, other = 2 * at, 2 * at + 1
        if other < size and (
            queue[other].time < queue[child].time
            or (queue[other].time == queue[child].time and queue[other].key < queue[child].key)
        ):
            child = other
        if time < queue[child].time or (time == queue[child].time and key < queue[child].key):
            break
        queue[at].time, queue[at].key = queue[child].time, queue[child].key
        at = child
    queue[at].time, queue[at].key = time, key
    queue[0].key = size - 1
    return first_time, first_key
