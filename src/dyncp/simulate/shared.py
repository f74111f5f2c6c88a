"""The event loop for phases that are not ordered: all messages in flight share the ports, as TCP
connections share a link.

Every pair of ranks has one connection per direction, which carries one message at a time. A sender
starts once it is notified that the receiver is ready. The note travels over the reverse connection,
after the messages that are already on it: if 1 → 0 is in flight until second 10, a message 0 → 1
that rank 1 launches at second 3 starts after second 10. Half of a message's latency is for the
note.

The messages in flight get fair rates (max-min fairness): the port with the smallest bandwidth per
message gives its messages equal shares, then the next port shares the rest among its other
messages, and so on. Example: three messages of 60 bytes, 0 → 1, 0 → 2 and 3 → 2, over ports of 10
bytes per second. Rank 0 sends 5 bytes per second to both, rank 2 receives 5 from both, and all
messages are done after 12 seconds. One at a time, 0 → 1 would be done after 6.
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

ALIKE = 1 + 1e-9  # shares that differ by less than this factor are equal


@inner
def _share(state: Simulation, active: Int64) -> None:
    """Sets the rates of the messages in flight, bytes per second."""
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
    """The smallest bandwidth that a port has for each message without a rate; marks these ports."""
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
    """Starts message m on its connection. Returns the number of messages in flight."""
    message = state.messages[m]
    current[message.source, message.target] = m
    message.send = message.receive = time
    active[count] = m
    return count + 1


@inner
def _last_of(state: Simulation, current: Int64, source: int, target: int) -> int:
    """The last message that is on a connection or waits for it; -1 if there is none."""
    last = int(current[source, target])
    while last >= 0 and state.messages[last].following >= 0:
        last = state.messages[last].following
    return last


@inner
def _count_end(state: Simulation, m: int, time: float) -> None:
    """The source of message m has launched it, or is notified at `time` that its target has."""
    message = state.messages[m]
    message.ends += 1
    message.send = max(message.send, time)
    if message.ends == 2:
        push(state.events, message.send, READY * KIND + m)


@inner
def _launch(state: Simulation, current: Int64, r: int, phase: int, time: float) -> None:
    """Rank r launches a phase. The note to a sender travels after the last message on the
    connection to that sender. `noted` is the first message in the list of notes after a message,
    `next_note` the next one in the list."""
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
    """Index of the message in flight that finishes first, and when; -1 and `due` if none finishes
    before `due`."""
    first, until = -1, due
    for i in range(len(active)):
        message = state.messages[active[i]]
        through = now + message.left / message.rate
        if through < until:
            first, until = i, through
    return first, until


@inner
def _flow(state: Simulation, active: Int64, now: float, until: float) -> None:
    """Advances the messages in flight to `until`; they slow down the ranks at both ends."""
    for m in active:
        message = state.messages[m]
        message.left -= message.rate * (until - now)
        disturb(state, message.source, now, until)
        disturb(state, message.target, now, until)


@inner
def _end(state: Simulation, m: int, time: float) -> None:
    """Message m has passed its ports, and the notes after it arrive."""
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
    """Runs a state to its end, in place, like `run_ordered`."""
    messages, events, num_phases = state.messages, state.events, state.cells.shape[1]
    active, count = np.empty(len(messages), np.int64), 0
    # The message on every connection.
    current = np.full((len(state.ranks), len(state.ranks)), -1, np.int64)
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
                    messages[last].following = number
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
        if messages[m].following >= 0:
            count = _send(state, current, active, count, messages[m].following, now)
        _end(state, m, now)
