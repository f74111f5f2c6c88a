"""The state of a simulation, one array of records per kind of thing, and the ports of a topology.

Compiled functions get few arrays this way: passing dozens cost more than the events themselves.

A message passes two ports: inside a node its source's and its target's own, between nodes the
NIC of its source and that of its target. Every port works each way on its own. With n ranks and m
NICs in all nodes the ports are numbered

    0 to n     out of a rank      2n to 2n + m        out of a NIC
    n to 2n    into a rank        2n + m to 2n + 2m   into a NIC
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Bool, Float64, Int64, starts_of
from dyncp.simulate.flow import Flow, FlowMessages
from dyncp.topology import Topology

Records = npt.NDArray[Any]
Record = Any  # one of them

# An instruction: when the host has issued it; when it is reached, stops waiting, and ends.
STEP = np.dtype(
    [
        ("op", np.int64),
        ("argument", np.int64),
        ("work", np.float64),
        ("issued", np.float64),
        ("reached", np.float64),
        ("begin", np.float64),
        ("end", np.float64),
    ]
)
# A rank: its next instruction and the end of its program; how many of its phases are launched;
# how many times longer computing takes while its messages travel, whether it computes, and until
# when its messages are known to travel.
RANK = np.dtype(
    [
        ("next", np.int64),
        ("last", np.int64),
        ("clock", np.float64),
        ("speed", np.float64),
        ("launched", np.int64),
        ("slowdown", np.float64),
        ("computing", np.int64),
        ("traffic", np.float64),
    ]
)
# A rank and phase: messages still to come in and the time of the last; where the cell's messages
# stand in `touching`.
CELL = np.dtype(
    [
        ("queued", np.int64),
        ("incoming", np.int64),
        ("arrived", np.float64),
        ("first", np.int64),
        ("last", np.int64),
    ]
)
# A message: whether it crosses a node's border (1) or not (0), ends that have begun its phase,
# ports passed, when its first and second port started,
# when both are through, and who waits behind it at a port, and beside it there (-1: nobody).
MESSAGE = np.dtype(
    [
        ("phase", np.int64),
        ("source", np.int64),
        ("target", np.int64),
        ("border", np.int64),
        ("size", np.float64),
        ("latency", np.float64),
        ("ends", np.int64),
        ("hop", np.int64),
        ("send", np.float64),
        ("receive", np.float64),
        ("tail", np.float64),
        ("arrival", np.float64),
        ("behind", np.int64),
        ("beside", np.int64),
    ]
)
# A port: when it is free, the first message that waits (-1: none), bytes that have passed.
PORT = np.dtype(
    [
        ("bandwidth", np.float64),
        ("free", np.float64),
        ("waiting", np.int64),
        ("moved", np.float64),
    ]
)
EVENT = np.dtype([("time", np.float64), ("key", np.int64)])


class EventState(NamedTuple):
    """`cells` are [ranks, phases], `routes` [messages, 2]. `touching` lists the messages of every
    cell; `events` is the queue. `queues` are [ranks, 2, 2]: of messages inside nodes and of
    those over borders, how many phases have begun, in the order of `Cell.queued`, and how many
    messages of begun phases have not arrived."""

    steps: Records
    ranks: Records
    cells: Records
    messages: Records
    routes: Int64
    touching: Int64
    ports: Records
    events: Records
    queues: Int64


def make_event_state(flow: Flow, topology: Topology) -> EventState:
    messages = flow.messages
    cells, touching = _cells(flow)
    bandwidths = port_bandwidths(topology)
    ports = np.zeros(len(bandwidths), PORT)
    ports["bandwidth"], ports["waiting"] = bandwidths, -1
    capacity = 1 + len(flow.work) + len(messages.phase) + len(ports)
    return EventState(
        _steps(flow),
        _ranks(flow, topology),
        cells,
        _messages(messages, topology),
        routes(topology, messages.source, messages.target),
        touching,
        ports,
        np.zeros(capacity, EVENT),
        np.zeros((flow.num_ranks, 2, 2), np.int64),
    )


def _steps(flow: Flow) -> Records:
    steps = np.zeros(len(flow.work), STEP)
    steps["op"], steps["argument"] = flow.programs.op, flow.programs.argument
    steps["work"] = flow.work
    if flow.host_seconds:
        number = np.arange(len(steps)) - flow.programs.first[flow.step_rank]
        steps["issued"] = flow.host_seconds * (number + 1)
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
    bounds = starts_of(np.bincount(both, minlength=num_cells)).reshape(-1)
    cells["first"] = bounds[:-1].reshape(cells.shape)
    cells["last"] = bounds[1:].reshape(cells.shape)
    cells["incoming"] = np.bincount(receives, minlength=num_cells).reshape(cells.shape)
    touching = np.argsort(both, kind="stable") % max(len(messages.phase), 1)
    return cells, touching


def _messages(messages: FlowMessages, topology: Topology) -> Records:
    records = np.zeros(len(messages.phase), MESSAGE)
    for name, column in messages._asdict().items():
        records[name] = column
    inside = is_inside(topology, messages.source, messages.target)
    records["latency"] = np.where(inside, topology.intra.latency, topology.inter.latency)
    records["border"], records["behind"], records["beside"] = ~inside, -1, -1
    return records


def port_bandwidths(topology: Topology) -> Float64:
    """Bytes per second of every port."""
    own, nics = 2 * topology.num_ranks, 2 * topology.nodes * topology.nics
    return np.repeat([topology.intra.bandwidth, topology.nic_bandwidth], [own, nics])


def is_inside(topology: Topology, source: Int64, target: Int64) -> Bool:
    """Which messages stay inside a node."""
    inside: Bool = source // topology.ranks_per_node == target // topology.ranks_per_node
    return inside


def nic_of(topology: Topology, rank: Int64) -> Int64:
    """The NIC of every rank, counted over all nodes."""
    node, local = np.divmod(rank, topology.ranks_per_node)
    nic: Int64 = node * topology.nics + local * topology.nics // topology.ranks_per_node
    return nic


def routes(topology: Topology, source: Int64, target: Int64) -> Int64:
    """The two ports of every message, int64[messages, 2]."""
    n, m = topology.num_ranks, topology.nodes * topology.nics
    inside = np.stack([source, n + target], axis=1)
    out_of, into = nic_of(topology, source), nic_of(topology, target)
    between = np.stack([2 * n + out_of, 2 * n + m + into], axis=1)
    return np.where(is_inside(topology, source, target)[:, None], inside, between)
