"""The event loop: ranks run their programs, messages of ordered phases pass ports.

A rank runs ahead until it waits for a phase that has not arrived. A message travels once both its
ends have begun its phase. A port serves one message at a time, the smallest waiting number first;
the head of a message goes on to the second port at once, so both work at the same time. Messages
inside nodes and over their borders do not wait for each other.

Where messages slow computation down, a rank computes until an event of its own: whatever of its
messages begins to travel meanwhile puts that off.
"""

from dyncp.arrays import Int64
from dyncp.compiled import compiled, inner
from dyncp.plan.format import COMPUTE, LAUNCH, WAIT
from dyncp.simulate.event_state import Record, Records


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


# Kinds of events; at equal times, smaller kinds go first.
ARRIVED, LAUNCHED, READY, PORT_FREE, COMPUTED = 0, 1, 2, 3, 4
KIND = 1 << 40  # an event's key is kind × KIND + number of message, rank and phase, or port


@inner
def _delayed(end: float, first: float, until: float, slowdown: float) -> float:
    """When a computation ends that would end at `end`, if messages travel from `first` to `until`.

    With slowdown 2, what would take from 0 to 10 gets half as far as usual from 4 to 8: until 12.
    """
    if first >= end or until <= first:
        return end
    if (end - first) * slowdown <= until - first:
        return first + (end - first) * slowdown
    return end + (until - first) * (1 - 1 / slowdown)


@inner
def advance(steps: Records, ranks: Records, cells: Records, events: Records, r: int) -> None:
    """Runs rank r up to a wait for something that has not arrived, or where messages slow it down,
    to its next computation."""
    rank = ranks[r]
    while rank.next < rank.last and not rank.computing:
        step = steps[rank.next]
        step.reached = max(rank.clock, step.issued)
        step.begin = step.reached
        if step.op == WAIT:
            cell = cells[r, step.argument]
            if cell.incoming > 0:
                return
            step.begin = max(step.reached, cell.arrived)
        seconds = step.work / rank.speed if step.op == COMPUTE else step.work
        step.end = step.begin + seconds
        if step.op == COMPUTE and rank.slowdown > 1:
            step.end = _delayed(step.end, step.begin, rank.traffic, rank.slowdown)
            rank.computing = 1
            push(events, step.end, COMPUTED * KIND + r)
            return
        rank.clock = step.end
        rank.next += 1
        if step.op == LAUNCH:
            push(events, step.end, LAUNCHED * KIND + r * cells.shape[1] + step.argument)


@inner
def _begin_phases(
    ranks: Records,
    queues: Int64,
    cells: Records,
    messages: Records,
    touching: Int64,
    events: Records,
    r: int,
    time: float,
) -> None:
    """Lets rank r's launched phases travel, one after the other."""
    for border in range(2):
        while queues[r, border, 0] < ranks[r].launched:
            if queues[r, border, 1] > 0:
                break
            cell = cells[r, cells[r, queues[r, border, 0]].queued]
            queues[r, border, 0] += 1
            for i in range(cell.first, cell.last):
                message = messages[touching[i]]
                if message.border != border:
                    continue
                queues[r, border, 1] += 1
                message.ends += 1
                if message.ends == 2:
                    push(events, time, READY * KIND + touching[i])


@inner
def _wait_at(port: Record, number: int, m: int, messages: Records, events: Records) -> None:
    """Queues message m at a port: a pairing heap, since queues are long on many ranks."""
    messages[m].behind = -1
    if port.waiting < 0:
        push(events, port.free, PORT_FREE * KIND + number)
        port.waiting = m
    else:
        port.waiting = _meld(messages, port.waiting, m)


@inner
def _meld(messages: Records, a: int, b: int) -> int:
    """Joins two heaps; returns the first message, behind which the other's stands."""
    first, other = min(a, b), max(a, b)
    messages[other].beside = messages[first].behind
    messages[first].behind = other
    return first


@inner
def _without_first(messages: Records, first: int) -> int:
    """The heap of those behind its first message; -1 where there are none."""
    pairs, left = -1, messages[first].behind
    while left >= 0:  # two by two, then all pairs
        one, two, left = left, messages[left].beside, -1
        if two >= 0:
            left = messages[two].beside
            one = _meld(messages, one, two)
        messages[one].beside = pairs
        pairs = one
    heap = pairs
    pairs = messages[heap].beside if heap >= 0 else -1
    while pairs >= 0:
        rest = messages[pairs].beside
        heap = _meld(messages, heap, pairs)
        pairs = rest
    return heap


@inner
def computed(
    steps: Records,
    ranks: Records,
    cells: Records,
    events: Records,
    r: int,
    time: float,
) -> None:
    """Rank r is done with its computation, or would be, had messages not put that off."""
    rank = ranks[r]
    end = steps[rank.next].end
    if end > time:
        push(events, end, COMPUTED * KIND + r)
        return
    rank.computing = 0
    rank.clock = end
    rank.next += 1
    advance(steps, ranks, cells, events, r)


@inner
def disturb(steps: Records, rank: Record, time: float, until: float) -> None:
    """A message of a rank travels from now on."""
    first = max(time, rank.traffic)
    if until <= first:
        return
    rank.traffic = until
    if rank.computing:
        step = steps[rank.next]
        step.end = _delayed(step.end, max(first, step.begin), until, rank.slowdown)


@inner
def _serve(steps: Records, ranks: Records, port: Record, message: Record, time: float) -> None:
    port.free = time + message.size / port.bandwidth
    port.moved += message.size
    rank = ranks[message.source if message.hop == 0 else message.target]
    if rank.slowdown > 1:
        disturb(steps, rank, time, port.free)
    if message.hop == 0:
        message.send = time
    message.receive = time
    message.tail = max(message.tail, port.free)
    message.hop += 1


@inner
def _travel(
    steps: Records,
    ranks: Records,
    messages: Records,
    routes: Int64,
    ports: Records,
    events: Records,
    m: int,
    time: float,
) -> None:
    """Takes message m through its next ports until one is busy, or to its arrival."""
    message = messages[m]
    while message.hop < 2:
        number = routes[m, message.hop]
        port = ports[number]
        if port.free > time or port.waiting >= 0:
            _wait_at(port, number, m, messages, events)
            return
        _serve(steps, ranks, port, message, time)
    message.arrival = message.tail + message.latency
    push(events, message.arrival, ARRIVED * KIND + m)


@inner
def _next_at_port(
    steps: Records,
    ranks: Records,
    messages: Records,
    routes: Int64,
    ports: Records,
    events: Records,
    number: int,
    time: float,
) -> None:
    """Serves the first message that waits at a port."""
    port = ports[number]
    m = port.waiting
    port.waiting = _without_first(messages, m)
    _serve(steps, ranks, port, messages[m], time)
    if port.waiting >= 0:
        push(events, port.free, PORT_FREE * KIND + number)
    _travel(steps, ranks, messages, routes, ports, events, m, time)


@inner
def arrive(
    steps: Records, ranks: Records, cells: Records, events: Records, message: Record
) -> None:
    """A message is there: its rank goes on if nothing else of the phase is missing."""
    cell = cells[message.target, message.phase]
    cell.incoming -= 1
    cell.arrived = message.arrival
    if cell.incoming == 0:
        advance(steps, ranks, cells, events, message.target)


@compiled
def run_events(
    steps: Records,
    ranks: Records,
    cells: Records,
    messages: Records,
    routes: Int64,
    touching: Int64,
    ports: Records,
    events: Records,
    queues: Int64,
) -> None:
    """Runs a state to its end, in place. A rank whose `next` is not `last` then is stuck."""
    for r in range(len(ranks)):
        advance(steps, ranks, cells, events, r)
    while events[0].key > 0:
        time, key = pop(events)
        kind, number = key // KIND, key % KIND
        if kind == READY:
            _travel(steps, ranks, messages, routes, ports, events, number, time)
        elif kind == PORT_FREE:
            _next_at_port(steps, ranks, messages, routes, ports, events, number, time)
        elif kind == COMPUTED:
            computed(steps, ranks, cells, events, number, time)
        elif kind == LAUNCHED:
            r, phase = number // cells.shape[1], number % cells.shape[1]
            cells[r, ranks[r].launched].queued = phase
            ranks[r].launched += 1
            _begin_phases(ranks, queues, cells, messages, touching, events, r, time)
        else:
            message = messages[number]
            arrive(steps, ranks, cells, events, message)
            for r in (message.source, message.target):
                queues[r, message.border, 1] -= 1
                _begin_phases(ranks, queues, cells, messages, touching, events, r, time)
