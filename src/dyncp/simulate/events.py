"""The state of a simulation and its event loop: ranks run their programs, messages pass ports.

A rank runs ahead until it waits for a phase that has not arrived. A message travels once both its
ends have begun its phase. It passes two ports: an intra-node message the ports of its two ranks, an
inter-node message the NICs of its two ranks. Every port has two independent directions and serves
one message at a time, the smallest waiting number first. The head of a message moves on to the
second port immediately, so both ports work at the same time. Intra-node and inter-node messages do
not wait for each other. With n ranks and m NICs in all nodes, the ports are numbered

    0 to n     out of a rank      2n to 2n + m        out of a NIC
    n to 2n    into a rank        2n + m to 2n + 2m   into a NIC

If messages slow computation down, the end of a computation is an event, which is postponed whenever
a message of that rank begins to travel.

`run_ordered` is the loop for ordered phases (NCCL); shared.py has the one for shared links (gloo).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Bool, Int64, starts_of
from dyncp.compiled import compiled, inner
from dyncp.plan.format import COMPUTE, LAUNCH, WAIT
from dyncp.simulate.flow import Flow
from dyncp.topology import Topology

Records = npt.NDArray[Any]
Record = Any  # one entry of Records


def _fields(integers: str, floats: str) -> np.dtype[Any]:
    kinds = ((integers, np.int64), (floats, np.float64))
    return np.dtype([(name, kind) for names, kind in kinds for name in names.split()])


# An instruction: when the host has issued it, and when it is reached, stops waiting, and ends.
STEP = _fields("op argument", "work issued reached begin end")
# A rank: its next instruction and the end of its program; how many of its phases are launched;
# whether it computes; how many times longer computing takes while its messages travel, and until
# when these are known to travel.
RANK = _fields("next last launched computing", "clock speed slowdown traffic")
# A rank and phase: the phase that was launched as this number; the number of messages to receive
# and the time of the last one; the range of the cell's messages in `touching`.
CELL = _fields("queued incoming first last", "arrived")
# A message: whether it is inter-node (1) or not (0), how many ends have begun its phase, and how
# many ports it has passed; when its first and second port started, and when both are done. On
# shared links (see shared.py): the messages that wait for it (-1: none), its rate, and its
# remaining bytes.
MESSAGE = _fields(
    "phase source target border ends hop following noted next_note",
    "size latency send receive tail arrival rate left",
)
# A port: the range of its queue in `waiting`; when it is free, and bytes that have passed. On
# shared links: messages without a rate, whether they get one now, and the bandwidth that is left
# for them.
PORT = _fields("first last users is_next", "bandwidth free moved left")
# Entry 0 of a queue holds its length as `key`; a binary heap follows.
EVENT = _fields("key", "time")


class Simulation(NamedTuple):
    """The state of a run, one structured array per kind of record. So compiled functions get few
    arrays; passing dozens took longer than the events themselves.

    `cells` are [ranks, phases], `ports_of` [messages, 2]. `touching` lists the messages of every
    cell, `waiting` has the queues of all ports, and `events` is the queue of the loop. `begun` and
    `under_way` are [ranks, 2], for intra-node and inter-node messages: how many phases have begun,
    in the order of `queued`, and how many messages of begun phases have not arrived.
    """

    steps: Records
    ranks: Records
    cells: Records
    messages: Records
    ports_of: Int64
    touching: Int64
    ports: Records
    waiting: Records
    events: Records
    begun: Int64
    under_way: Int64


def make_state(flow: Flow, topology: Topology) -> Simulation:
    cells, touching = _cells(flow)
    ports_of, inside = _ports_of(flow, topology)
    ports, waiting = _ports(ports_of, topology)
    return Simulation(
        _steps(flow),
        _ranks(flow, topology),
        cells,
        _messages(flow, inside, topology),
        ports_of,
        touching,
        ports,
        waiting,
        np.zeros(1 + len(flow.work) + len(inside) + len(ports), EVENT),
        np.zeros((flow.num_ranks, 2), np.int64),
        np.zeros((flow.num_ranks, 2), np.int64),
    )


def _steps(flow: Flow) -> Records:
    steps = np.zeros(len(flow.work), STEP)
    steps["op"], steps["argument"] = flow.programs.op, flow.programs.argument
    steps["work"] = flow.work
    steps["issued"] = flow.issued
    return steps


def _ranks(flow: Flow, topology: Topology) -> Records:
    ranks = np.zeros(flow.num_ranks, RANK)
    ranks["next"], ranks["last"] = flow.programs.first[:-1], flow.programs.first[1:]
    ranks["speed"], ranks["slowdown"] = topology.rank_speeds, flow.slowdown
    return ranks


def _cells(flow: Flow) -> tuple[Records, Int64]:
    messages, num_cells = flow.messages, flow.num_ranks * flow.num_phases
    cells = np.zeros((flow.num_ranks, flow.num_phases), CELL)
    sends = messages.source * flow.num_phases + messages.phase
    receives = messages.target * flow.num_phases + messages.phase
    both = np.concatenate([sends, receives])
    bounds = starts_of(np.bincount(both, minlength=num_cells))
    cells["first"] = bounds[:-1].reshape(cells.shape)
    cells["last"] = bounds[1:].reshape(cells.shape)
    cells["incoming"] = np.bincount(receives, minlength=num_cells).reshape(cells.shape)
    touching = np.argsort(both, kind="stable") % max(len(messages.phase), 1)
    return cells, touching


def _messages(flow: Flow, inside: Bool, topology: Topology) -> Records:
    records = np.zeros(len(inside), MESSAGE)
    for name, column in flow.messages._asdict().items():
        records[name] = column
    records["latency"] = np.where(inside, topology.intra.latency, topology.inter.latency)
    records["border"], records["left"] = ~inside, records["size"]
    for name in ("following", "noted", "next_note"):
        records[name] = -1
    return records


def _ports_of(flow: Flow, topology: Topology) -> tuple[Int64, Bool]:
    """The two ports of every message, and whether it stays inside a node."""
    n, m = topology.num_ranks, topology.nodes * topology.nics
    ends = np.stack([flow.messages.source, flow.messages.target], axis=1)
    node, local = np.divmod(ends, topology.ranks_per_node)
    nic = node * topology.nics + local * topology.nics // topology.ranks_per_node
    inside: Bool = node[:, 0] == node[:, 1]
    own, over_border = ends + np.array([0, n]), 2 * n + nic + np.array([0, m])
    return np.where(inside[:, None], own, over_border), inside


def _ports(ports_of: Int64, topology: Topology) -> tuple[Records, Records]:
    """The ports, and empty queues with room for all of their messages."""
    of_ranks, of_nics = 2 * topology.num_ranks, 2 * topology.nodes * topology.nics
    ports = np.zeros(of_ranks + of_nics, PORT)
    bounds = starts_of(1 + np.bincount(ports_of.reshape(-1), minlength=len(ports)))
    ports["first"], ports["last"] = bounds[:-1], bounds[1:]
    bandwidths = [topology.intra.bandwidth, topology.nic_bandwidth]
    ports["bandwidth"] = np.repeat(bandwidths, [of_ranks, of_nics])
    return ports, np.zeros(bounds[-1], EVENT)


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


# Kinds of events; at equal times, smaller kinds come first.
ARRIVED, LAUNCHED, READY, PORT_FREE, COMPUTED = 0, 1, 2, 3, 4
KIND = 1 << 40  # an event's key is kind × KIND + number of message, rank and phase, or port


@inner
def _delayed(end: float, first: float, until: float, slowdown: float) -> float:
    """New end of a computation that would end at `end`, if messages travel from `first` to `until`.

    With slowdown 2, a computation from 0 to 10 runs at half speed from 4 to 8, and ends at 12.
    """
    if first >= end or until <= first:
        return end
    if (end - first) * slowdown <= until - first:
        return first + (end - first) * slowdown
    return end + (until - first) * (1 - 1 / slowdown)


@inner
def advance(state: Simulation, r: int) -> None:
    """Runs rank r until it waits for a phase that has not arrived or, if messages slow computation
    down, until its next COMPUTE."""
    rank, cells = state.ranks[r], state.cells
    while rank.next < rank.last and not rank.computing:
        step = state.steps[rank.next]
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
            push(state.events, step.end, COMPUTED * KIND + r)
            return
        rank.clock = step.end
        rank.next += 1
        if step.op == LAUNCH:
            push(state.events, step.end, LAUNCHED * KIND + r * cells.shape[1] + step.argument)


@inner
def computed(state: Simulation, r: int, time: float) -> None:
    """Rank r has finished its computation, unless messages have postponed its end."""
    rank = state.ranks[r]
    end = state.steps[rank.next].end
    if end > time:
        push(state.events, end, COMPUTED * KIND + r)
        return
    rank.computing = 0
    rank.clock = end
    rank.next += 1
    advance(state, r)


@inner
def disturb(state: Simulation, r: int, time: float, until: float) -> None:
    """A message of rank r travels from `time` to `until`, which slows its computation down."""
    rank = state.ranks[r]
    first = max(time, rank.traffic)
    if rank.slowdown <= 1 or until <= first:
        return
    rank.traffic = until
    if rank.computing:
        step = state.steps[rank.next]
        step.end = _delayed(step.end, max(first, step.begin), until, rank.slowdown)


@inner
def arrive(state: Simulation, message: Record) -> None:
    """A message arrives; its rank continues if the phase is complete."""
    cell = state.cells[message.target, message.phase]
    cell.incoming -= 1
    cell.arrived = message.arrival
    if cell.incoming == 0:
        advance(state, message.target)


@inner
def _begin_phases(state: Simulation, r: int, time: float) -> None:
    """Starts launched phases of rank r whose predecessors have arrived, separately for intra-node
    and inter-node messages."""
    for border in range(2):
        while state.begun[r, border] < state.ranks[r].launched:
            if state.under_way[r, border] > 0:
                break
            cell = state.cells[r, state.cells[r, state.begun[r, border]].queued]
            state.begun[r, border] += 1
            for m in state.touching[cell.first : cell.last]:
                message = state.messages[m]
                if message.border != border:
                    continue
                state.under_way[r, border] += 1
                message.ends += 1
                if message.ends == 2:
                    push(state.events, time, READY * KIND + m)


@inner
def _serve(state: Simulation, port: Record, message: Record, time: float) -> None:
    port.free = time + message.size / port.bandwidth
    port.moved += message.size
    disturb(state, message.source if message.hop == 0 else message.target, time, port.free)
    if message.hop == 0:
        message.send = time
    message.receive = time
    message.tail = max(message.tail, port.free)
    message.hop += 1


@inner
def _travel(state: Simulation, m: int, time: float) -> None:
    """Moves message m through its next ports until one is busy, or to its arrival."""
    message = state.messages[m]
    while message.hop < 2:
        number = state.ports_of[m, message.hop]
        port = state.ports[number]
        queue = state.waiting[port.first : port.last]
        if port.free > time or queue[0].key > 0:
            if queue[0].key == 0:
                push(state.events, port.free, PORT_FREE * KIND + number)
            push(queue, 0.0, m)
            return
        _serve(state, port, message, time)
    message.arrival = message.tail + message.latency
    push(state.events, message.arrival, ARRIVED * KIND + m)


@inner
def _next_at_port(state: Simulation, number: int, time: float) -> None:
    """Serves the first message that waits at a port."""
    port = state.ports[number]
    queue = state.waiting[port.first : port.last]
    _, m = pop(queue)
    _serve(state, port, state.messages[m], time)
    if queue[0].key > 0:
        push(state.events, port.free, PORT_FREE * KIND + number)
    _travel(state, m, time)


@compiled
def run_ordered(state: Simulation) -> None:
    """Runs a state to its end, in place. Afterwards, a rank whose `next` is not `last` is stuck."""
    for r in range(len(state.ranks)):
        advance(state, r)
    while state.events[0].key > 0:
        time, key = pop(state.events)
        kind, number = key // KIND, key % KIND
        if kind == READY:
            _travel(state, number, time)
        elif kind == PORT_FREE:
            _next_at_port(state, number, time)
        elif kind == COMPUTED:
            computed(state, number, time)
        elif kind == LAUNCHED:
            r, phase = number // state.cells.shape[1], number % state.cells.shape[1]
            state.cells[r, state.ranks[r].launched].queued = phase
            state.ranks[r].launched += 1
            _begin_phases(state, r, time)
        else:
            message = state.messages[number]
            arrive(state, message)
            for r in (message.source, message.target):
                state.under_way[r, message.border] -= 1
                _begin_phases(state, r, time)
