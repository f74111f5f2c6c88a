"""The event loop where phases are not ordered: all messages under way share the ports, as
connections share a link.

Every pair of ranks has a connection each way, which carries one message after the other. A sender
starts once it knows that the receiver is ready; that note travels over the reverse connection,
after the messages already on it: with 1 → 0 under way until second 10, a message 0 → 1 that rank 1
launches at second 3 sets out after second 10. Of a message's latency one half is for this note.

The messages under way get fair rates: the port with the least for each of its messages gives them
equal shares, then the next one shares what is left among the others, and so on. Three messages of
60 bytes, 0 → 1, 0 → 2 and 3 → 2, over ports of 10 bytes per second: rank 0 sends 5 to both, rank 2
receives 5 from both, and all are through after 12 seconds. One at a time, 0 → 1 would be through
after 6.
"""

import numpy as np

from dyncp.arrays import Int64
from dyncp.compiled import compiled, inner
from dyncp.simulate.events import (
    ARRIVED,
    COMPUTED,
    KIND,
    LAUNCHED,
    READY,
    Simulation,
    advance,
    arrive,
    computed,
    disturb,
    pop,
    push,
)

ALIKE = 1 + 1e-9  # shares that differ by less are equal


@inner
def _share(state: Simulation, active: Int64) -> None:
    """Rates of the messages under way, bytes per second."""
    messages, ports, ports_of = state.messages, state.ports, state.ports_of
    for m in active:
        messages[m].rate = 0.0
        for p in ports_of[m]:
            ports[p].users, ports[p].left = 0, ports[p].bandwidth
    for m in active:
        for p in ports_of[m]:
            ports[p].users += 1
    left = len(active)
    while left > 0:
        least = _least_share(state, active)
        for m in active:
            first, second = ports[ports_of[m, 0]], ports[ports_of[m, 1]]
            if messages[m].rate == 0.0 and (first.is_next or second.is_next):
                messages[m].rate = least
                left -= 1
                for p in ports_of[m]:
                    ports[p].users -= 1
                    ports[p].left = max(ports[p].left - least, 0.0)


@inner
def _least_share(state: Simulation, active: Int64) -> float:
    """What the fullest ports have for each message without a rate; marks these ports."""
    ports, ports_of, least = state.ports, state.ports_of, np.inf
    for m in active:
        if state.messages[m].rate == 0.0:
            for p in ports_of[m]:
                least = min(least, ports[p].left / ports[p].users)
    for m in active:
        for p in ports_of[m]:
            ports[p].is_next = ports[p].left <= ports[p].users * (least * ALIKE)
    return least


@inner
def _send(state: Simulation, current: Int64, active: Int64, count: int, m: int, time: float) -> int:
    """Message m goes over its connection from now on. Returns how many are under way."""
    message = state.messages[m]
    current[message.source, message.target] = m
    message.send = message.receive = time
    active[count] = m
    return count + 1


@inner
def _last_of(state: Simulation, current: Int64, source: int, target: int) -> int:
    """The last message of a connection; -1 where there is none."""
    last = int(current[source, target])
    while last >= 0 and state.messages[last].behind >= 0:
        last = state.messages[last].behind
    return last


@inner
def _count_end(state: Simulation, m: int, time: float) -> None:
    """The source of message m has launched it, or knows then that its target has."""
    message = state.messages[m]
    message.ends += 1
    message.send = max(message.send, time)
    if message.ends == 2:
        push(state.events, message.send, READY * KIND + m)


@inner
def _launch(state: Simulation, current: Int64, r: int, phase: int, time: float) -> None:
    """Rank r launches a phase. Senders are told of it behind the message that is last on the
    connection to them: `noted` begins its list of messages to tell of, `next_note` goes on."""
    cell = state.cells[r, phase]
    for m in state.touching[cell.first : cell.last]:
        message = state.messages[m]
        if r == message.source:
            _count_end(state, m, time)
            continue
        ahead = _last_of(state, current, message.target, message.source)
        if ahead < 0:
            _count_end(state, m, time + message.latency / 2)
        else:
            message.next_note = state.messages[ahead].noted
            state.messages[ahead].noted = m


@inner
def _first_through(state: Simulation, active: Int64, now: float, due: float) -> tuple[int, float]:
    """Which of the messages under way finishes first, and when; -1 and `due` if none does before
    that."""
    first, until = -1, due
    for i in range(len(active)):
        message = state.messages[active[i]]
        through = now + message.left / message.rate
        if through < until:
            first, until = i, through
    return first, until


@inner
def _flow(state: Simulation, active: Int64, now: float, until: float) -> None:
    """Messages under way go on, and slow the ranks at their ends down."""
    for m in active:
        message = state.messages[m]
        message.left -= message.rate * (until - now)
        disturb(state, message.source, now, until)
        disturb(state, message.target, now, until)


@inner
def _end(state: Simulation, m: int, time: float) -> None:
    """Message m has passed its ports, and the notes behind it are there."""
    message = state.messages[m]
    message.tail, message.arrival = time, time + message.latency / 2
    push(state.events, message.arrival, ARRIVED * KIND + m)
    for p in state.ports_of[m]:
        state.ports[p].free = time
        state.ports[p].moved += message.size
    noted = message.noted
    while noted >= 0:
        _count_end(state, noted, time + message.latency / 2)
        noted = state.messages[noted].next_note


@compiled
def run_shared(state: Simulation) -> None:
    """As `run_ordered`."""
    messages, events, num_phases = state.messages, state.events, state.cells.shape[1]
    active, count = np.empty(len(messages), np.int64), 0
    current = np.full((len(state.ranks), len(state.ranks)), -1, np.int64)  # of every connection
    now, changed = 0.0, False
    for r in range(len(state.ranks)):
        advance(state, r)
    while events[0].key > 0 or count > 0:
        due = events[1].time if events[0].key > 0 else np.inf
        if due <= now:
            time, key = pop(events)
            kind, number = key // KIND, key % KIND
            if kind == COMPUTED:
                computed(state, number, time)
            elif kind == LAUNCHED:
                _launch(state, current, number // num_phases, number % num_phases, time)
            elif kind == ARRIVED:
                arrive(state, messages[number])
            else:
                last = _last_of(state, current, messages[number].source, messages[number].target)
                if last >= 0:
                    messages[last].behind = number
                else:
                    count = _send(state, current, active, count, number, now)
                    changed = True
            continue
        if changed:
            _share(state, active[:count])
            changed = False
        first, until = _first_through(state, active[:count], now, due)
        _flow(state, active[:count], now, until)
        now = until
        if first < 0:
            continue
        m = active[first]
        count, changed = count - 1, True
        active[first] = active[count]
        current[messages[m].source, messages[m].target] = -1
        if messages[m].behind >= 0:
            count = _send(state, current, active, count, messages[m].behind, now)
        _end(state, m, now)
