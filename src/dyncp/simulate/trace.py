"""Writes a simulated step as a trace for Perfetto or chrome://tracing."""

import json
from itertools import product
from pathlib import Path
from typing import Any

from dyncp.simulate.attention_times import AttentionTimes
from dyncp.simulate.simulated import Simulated
from dyncp.simulate.timeline import Lane, Timeline, make_timeline
from dyncp.topology import Topology

MICROSECONDS = 1e6
SAME_TIME = 1e-12  # seconds


def trace(simulated: Simulated, path: str | Path) -> None:
    """One process per machine, one thread per rank and lane (more where messages share a link); one
    layer of every mask, forward and then backward, one after the other."""
    runs = list(simulated.runs())
    topology = runs[0][1].topology
    events, offset = list[dict[str, Any]](), 0.0
    for name, times in runs:
        events += _events(name, times, offset)
        offset += times.seconds
    most = max((event["tid"] // _num_lanes(topology) for event in events), default=0)
    events = [*_names(topology, 1 + most), *events]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def _num_lanes(topology: Topology) -> int:
    return topology.num_ranks * len(Lane)


def _thread(rank: int, lane: int) -> int:
    return rank * len(Lane) + lane


def _names(topology: Topology, rows: int) -> list[dict[str, Any]]:
    """`rows` of threads for every lane."""
    events = [
        {"ph": "M", "name": "process_name", "pid": machine, "args": {"name": f"machine {machine}"}}
        for machine in range(topology.machines)
    ]
    for rank in range(topology.num_ranks):
        for lane, row in product(Lane, range(rows)):
            name = f"rank {rank} {lane.name.lower().replace('_', ' ')}"
            thread = row * _num_lanes(topology) + _thread(rank, lane)
            place = {"pid": topology.machine_of(rank), "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
            order = {"sort_index": _thread(rank, lane) * rows + row}
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": order})
    return events


def _events(name: str, times: AttentionTimes, offset: float) -> list[dict[str, Any]]:
    timeline, topology = make_timeline(times), times.topology
    return [
        {
            "ph": "X",
            "name": timeline.label(entry),
            "cat": name,
            "pid": topology.machine_of(int(timeline.rank[entry])),
            "tid": row * _num_lanes(topology)
            + _thread(int(timeline.rank[entry]), int(timeline.lane[entry])),
            "ts": (offset + float(timeline.start[entry])) * MICROSECONDS,
            "dur": float(timeline.end[entry] - timeline.start[entry]) * MICROSECONDS,
        }
        for entry, row in enumerate(_rows(timeline))
    ]


def _rows(timeline: Timeline) -> list[int]:
    """The first row of its lane that is free when an entry starts: 0, but for overlaps."""
    rows, lane, free = list[int](), (-1, -1), list[float]()
    for entry in range(len(timeline)):
        own = int(timeline.rank[entry]), int(timeline.lane[entry])
        if own != lane:
            lane, free = own, []
        start, end = float(timeline.start[entry]), float(timeline.end[entry])
        fitting = [row for row, since in enumerate(free) if since <= start + SAME_TIME]
        rows.append(fitting[0] if fitting else len(free))
        free[rows[-1] : rows[-1] + 1] = [end]
    return rows
