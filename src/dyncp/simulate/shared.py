"""The event loop where phases are not ordered: all messages under way share the ports, as
connections share a link.

Every pair of ranks has a connection each way, which carries one message after the other. A sender
sends only when it knows that the receiver is there. It is told over the connection back, behind the
messages that are on it already: with 1 → 0 under way until second 10, a message 0 → 1 that rank 1
launches at second 3 sets out after second 10. Of a message's latency one half is for this note.

The messages under way get fair rates: the port with the least for each of its messages gives them
equal shares, then the next one shares what is left among the others, and so on. Three messages of
60 bytes, 0 → 1, 0 → 2 and 3 → 2, over ports of 10 bytes per second: rank 0 sends 5 to both, rank 2
receives 5 from both, and all are through after 12 seconds. One at a time, 0 → 1 would be through
after 6.
"""

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.compiled import compiled, inner
from dyncp.simulate.event_state import Record, Records
from dyncp.simulate.events import (
    ARRIVED,
    COMPUTED,
    KIND,
    LAUNCHED,
    READY,
    advance,
    arrive,
    computed,
    disturb,
    pop,
    push,
)

ALIKE = 1 + 1e-9  # shares that differ by less are equal


@inner
def _share(
    routes: Int64, ports: Records, active: Int64, rate: Float64, users: Int64, room: Float64
) -> None:
    """Rates of the messages under way, bytes per second."""
    for m in active:
        rate[m] = 0.0
        for port in routes[m]:
            users[port], room[port] = 0, ports[port].bandwidth
    for m in active:
        for port in routes[m]:
            users[port] += 1
    left = len(active)
    while left > 0:
        least = np.inf
        for m in active:
            if rate[m] == 0.0:
                for port in routes[m]:
                    least = min(least, room[port] / users[port])
        short: Bool = room <= users * (least * ALIKE)
        for m in active:
            if rate[m] == 0.0 and (short[routes[m, 0]] or short[routes[m, 1]]):
                rate[m] = least
                left -= 1
                for port in routes[m]:
                    users[port] -= 1
                    room[port] = max(room[port] - least, 0.0)


@inner
def _send(messages: Records, current: Int64, active: Int64, count: int, m: int, time: float) -> int:
    """Message m goes over its connection from now on. Returns how many are under way."""
    message = messages[m]
    current[message.source, message.target] = m
    message.send = message.receive = time
    active[count] = m
    return count + 1


@inner
def _last_of(messages: Records, current: Int64, source: int, target: int) -> int:
    """The last message of a connection; -1 where there is none."""
    last = int(current[source, target])
    while last >= 0 and messages[last].behind >= 0:
        last = messages[last].behind
    return last


@inner
def _count_end(messages: Records, events: Records, m: int, time: float) -> None:
    """The source of message m has launched it, or knows then that its target has."""
    message = messages[m]
    message.ends += 1
    message.send = max(message.send, time)
    if message.ends == 2:
        push(events, message.send, READY * KIND + m)


@inner
def _launch(
    messages: Records,
    touching: Int64,
    cell: Record,
    r: int,
    current: Int64,
    notes: Int64,
    events: Records,
    time: float,
) -> None:
    """Rank r launches a phase. `notes` are lists of messages whose senders are to know of it: where
    the list behind each message begins, and which comes next in it."""
    for i in range(cell.first, cell.last):
        m = touching[i]
        message = messages[m]
        if r == message.source:
            _count_end(messages, events, m, time)
            continue
        ahead = _last_of(messages, current, message.target, message.source)
        if ahead < 0:
            _count_end(messages, events, m, time + message.latency / 2)
        else:
            notes[m, 1] = notes[ahead, 0]
            notes[ahead, 0] = m


@inner
def _first_through(
    active: Int64, rate: Float64, size_left: Float64, now: float, due: float
) -> tuple[int, float]:
    """Which of the messages under way is through first, and when; -1 and `due` if none is before
    that."""
    first, until = -1, due
    for i in range(len(active)):
        through = now + size_left[active[i]] / rate[active[i]]
        if through < until:
            first, until = i, through
    return first, until


@inner
def _flow(
    steps: Records,
    ranks: Records,
    messages: Records,
    active: Int64,
    rate: Float64,
    size_left: Float64,
    now: float,
    until: float,
) -> None:
    """Messages under way go on, and slow the ranks at their ends down."""
    for m in active:
        size_left[m] -= rate[m] * (until - now)
        for r in (messages[m].source, messages[m].target):
            if ranks[r].slowdown > 1:
                disturb(steps, ranks[r], now, until)


@inner
def _end(
    messages: Records,
    routes: Int64,
    ports: Records,
    notes: Int64,
    events: Records,
    m: int,
    time: float,
) -> None:
    """Message m has passed its ports, and the notes behind it are there."""
    message = messages[m]
    message.tail, message.arrival = time, time + message.latency / 2
    push(events, message.arrival, ARRIVED * KIND + m)
    for port in routes[m]:
        ports[port].free = time
        ports[port].moved += message.size
    noted = notes[m, 0]
    while noted >= 0:
        _count_end(messages, events, noted, time + message.latency / 2)
        noted = notes[noted, 1]


@compiled
def run_shared(
    steps: Records,
    ranks: Records,
    cells: Records,
    messages: Records,
    routes: Int64,
    touching: Int64,
    ports: Records,
    events: Records,
    _queues: Int64,
) -> None:
    """As `run_events`."""
    active, count = np.empty(len(messages), np.int64), 0
    current = np.full((len(ranks), len(ranks)), -1, np.int64)  # message of every connection
    notes = np.full((len(messages), 2), -1, np.int64)
    rate, size_left = np.zeros(len(messages)), messages["size"].copy()
    users, room = np.zeros(len(ports), np.int64), np.zeros(len(ports))
    now, changed = 0.0, False
    for r in range(len(ranks)):
        advance(steps, ranks, cells, events, r)
    while events[0].key > 0 or count > 0:
        due = events[1].time if events[0].key > 0 else np.inf
        if due <= now:
            time, key = pop(events)
            kind, number = key // KIND, key % KIND
            if kind == COMPUTED:
                computed(steps, ranks, cells, events, number, time)
            elif kind == LAUNCHED:
                r, phase = number // cells.shape[1], number % cells.shape[1]
                _launch(messages, touching, cells[r, phase], r, current, notes, events, time)
            elif kind == ARRIVED:
                arrive(steps, ranks, cells, events, messages[number])
            else:
                last = _last_of(messages, current, messages[number].source, messages[number].target)
                if last >= 0:
                    messages[last].behind = number
                else:
                    count = _send(messages, current, active, count, number, now)
                    changed = True
            continue
        if changed:
            _share(routes, ports, active[:count], rate, users, room)
            changed = False
        first, until = _first_through(active[:count], rate, size_left, now, due)
        _flow(steps, ranks, messages, active[:count], rate, size_left, now, until)
        now = until
        if first < 0:
            continue
        m = active[first]
        count, changed = count - 1, True
        active[first] = active[count]
        current[messages[m].source, messages[m].target] = -1
        if messages[m].behind >= 0:
            count = _send(messages, current, active, count, messages[m].behind, now)
        _end(messages, routes, ports, notes, events, m, now)
