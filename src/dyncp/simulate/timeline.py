"""Timeline: what every track of every rank does, and when; also as a trace for Perfetto."""

import json
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.plan import Op
from dyncp.simulate.event_state import is_inside
from dyncp.simulate.flow import END, START
from dyncp.simulate.results import AttentionTimes, Simulated
from dyncp.topology import Topology


class Track(IntEnum):
    """What can be busy on its own; `*_NETWORK` is a rank's way to other nodes."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    SEND_NETWORK = 3
    RECEIVE_NETWORK = 4


class Activity(IntEnum):
    """What a track does. COMPUTE belongs to a division, START and END to the whole program, the
    others to a phase."""

    COMPUTE = 0
    PACK = 1
    WAIT = 2
    UNPACK = 3
    SEND = 4
    RECEIVE = 5
    START = 6
    END = 7


@dataclass(frozen=True, eq=False)
class Timeline:
    """One entry per stretch of time above 0, ordered by rank, track and start. `number` is the
    division or phase, `peer` the other rank of a message (else -1). Seconds."""

    rank: Int64
    track: Int64
    activity: Int64
    number: Int64
    peer: Int64
    start: Float64
    end: Float64

    def __len__(self) -> int:
        return len(self.rank)

    def label(self, entry: int) -> str:
        """Like "compute 2", "wait 0" or "send 1 to 5"."""
        activity = Activity(int(self.activity[entry]))
        if activity in (Activity.START, Activity.END):
            return activity.name.lower()
        text = f"{activity.name.lower()} {self.number[entry]}"
        if activity is Activity.SEND:
            return f"{text} to {self.peer[entry]}"
        return f"{text} from {self.peer[entry]}" if activity is Activity.RECEIVE else text


def make_timeline(times: AttentionTimes) -> Timeline:
    """All tracks of all ranks. A track never does two things at once, but for messages that share a
    link, where phases are not ordered."""
    parts = [*_step_entries(times), *_message_entries(times)]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    some = columns[6] > columns[5]
    columns = [column[some] for column in columns]
    order = np.lexsort((columns[5], columns[1], columns[0]))
    return Timeline(*(column[order] for column in columns))


Entries = tuple[Int64, Int64, Int64, Int64, Int64, Float64, Float64]


def _step_entries(times: AttentionTimes) -> list[Entries]:
    programs, steps = times.flow.programs, times.steps

    def entries(op: int, activity: Activity, start: Float64, end: Float64) -> Entries:
        chosen = programs.op == op
        rank, number = times.step_rank[chosen], programs.argument[chosen]
        track, what = np.full_like(rank, Track.COMPUTE), np.full_like(rank, activity)
        return rank, track, what, number, np.full_like(rank, -1), start[chosen], end[chosen]

    return [
        entries(Op.COMPUTE, Activity.COMPUTE, steps["begin"], steps["end"]),
        entries(Op.LAUNCH, Activity.PACK, steps["begin"], steps["end"]),
        entries(Op.WAIT, Activity.WAIT, steps["reached"], steps["begin"]),
        entries(Op.WAIT, Activity.UNPACK, steps["begin"], steps["end"]),
        entries(START, Activity.START, steps["begin"], steps["end"]),
        entries(END, Activity.END, steps["begin"], steps["end"]),
    ]


def _message_entries(times: AttentionTimes) -> list[Entries]:
    """Time in the first port (sending) and in the second (receiving); where messages share ports,
    that of the message."""
    messages, topology = times.flow.messages, times.topology
    inside = is_inside(topology, messages.source, messages.target)
    busy = messages.size / np.where(inside, topology.intra.bandwidth, topology.nic_bandwidth)
    if not topology.ordered_phases:
        busy = times.messages["tail"] - times.messages["send"]

    def entries(
        rank: Int64, peer: Int64, tracks: tuple[Track, Track], activity: Activity, start: Float64
    ) -> Entries:
        track = np.where(inside, *tracks).astype(np.int64)
        what = np.full_like(rank, activity)
        return rank, track, what, messages.phase, peer, start, start + busy

    source, target = messages.source, messages.target
    send, receive = times.messages["send"], times.messages["receive"]
    return [
        entries(source, target, (Track.SEND, Track.SEND_NETWORK), Activity.SEND, send),
        entries(target, source, (Track.RECEIVE, Track.RECEIVE_NETWORK), Activity.RECEIVE, receive),
    ]


MICROSECONDS = 1e6
SAME_TIME = 1e-12  # seconds


def trace(simulated: Simulated, path: str | Path) -> None:
    """One process per node, one thread per rank and track (more where messages share a link).
    Has one layer of every mask, first forward, then backward."""
    runs = list(simulated.runs())
    topology = runs[0][1].topology
    events, offset = list[dict[str, Any]](), 0.0
    for name, times in runs:
        events += _events(name, times, offset)
        offset += times.seconds
    most = max((event["tid"] // _num_tracks(topology) for event in events), default=0)
    events = [*_names(topology, 1 + most), *events]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def _num_tracks(topology: Topology) -> int:
    return topology.num_ranks * len(Track)


def _thread(rank: int, track: int) -> int:
    return rank * len(Track) + track


def _names(topology: Topology, rows: int) -> list[dict[str, Any]]:
    """`rows` of threads for every track."""
    events = [
        {"ph": "M", "name": "process_name", "pid": node, "args": {"name": f"node {node}"}}
        for node in range(topology.nodes)
    ]
    for rank in range(topology.num_ranks):
        for track, row in product(Track, range(rows)):
            name = f"rank {rank} {track.name.lower().replace('_', ' ')}"
            thread = row * _num_tracks(topology) + _thread(rank, track)
            place = {"pid": topology.node_of(rank), "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
            order = {"sort_index": _thread(rank, track) * rows + row}
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": order})
    return events


def _events(name: str, times: AttentionTimes, offset: float) -> list[dict[str, Any]]:
    timeline, topology = make_timeline(times), times.topology
    return [
        {
            "ph": "X",
            "name": timeline.label(entry),
            "cat": name,
            "pid": topology.node_of(int(timeline.rank[entry])),
            "tid": row * _num_tracks(topology)
            + _thread(int(timeline.rank[entry]), int(timeline.track[entry])),
            "ts": (offset + float(timeline.start[entry])) * MICROSECONDS,
            "dur": float(timeline.end[entry] - timeline.start[entry]) * MICROSECONDS,
        }
        for entry, row in enumerate(_rows(timeline))
    ]


def _rows(timeline: Timeline) -> list[int]:
    """The first row of its track that is free when an entry starts: 0, but for overlaps."""
    rows, track, free = list[int](), (-1, -1), list[float]()
    for entry in range(len(timeline)):
        own = int(timeline.rank[entry]), int(timeline.track[entry])
        if own != track:
            track, free = own, []
        start, end = float(timeline.start[entry]), float(timeline.end[entry])
        fitting = [row for row, since in enumerate(free) if since <= start + SAME_TIME]
        rows.append(fitting[0] if fitting else len(free))
        free[rows[-1] : rows[-1] + 1] = [end]
    return rows
