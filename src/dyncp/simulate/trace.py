"""Writes a simulated step as a trace for Perfetto or chrome://tracing."""

import json
from pathlib import Path
from typing import Any

from dyncp.simulate.attention_times import AttentionTimes
from dyncp.simulate.simulated import Simulated
from dyncp.simulate.timeline import Lane, make_timeline
from dyncp.topology import Topology

MICROSECONDS = 1e6


def trace(simulated: Simulated, path: str | Path) -> None:
    """One process per machine, one thread per rank and lane; one layer of every mask, forward and
    then backward, one after the other."""
    runs = list(simulated.runs())
    events, offset = _names(runs[0][1].topology), 0.0
    for name, times in runs:
        events += _events(name, times, offset)
        offset += times.seconds
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    Path(path).write_text(text, encoding="utf-8")


def _thread(rank: int, lane: int) -> int:
    return rank * len(Lane) + lane


def _names(topology: Topology) -> list[dict[str, Any]]:
    events = [
        {"ph": "M", "name": "process_name", "pid": machine, "args": {"name": f"machine {machine}"}}
        for machine in range(topology.machines)
    ]
    for rank in range(topology.num_ranks):
        for lane in Lane:
            name = f"rank {rank} {lane.name.lower().replace('_', ' ')}"
            place = {"pid": topology.machine_of(rank), "tid": _thread(rank, lane)}
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
            order = {"sort_index": _thread(rank, lane)}
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": order})
    return events


def _events(name: str, times: AttentionTimes, offset: float) -> list[dict[str, Any]]:
    timeline = make_timeline(times)
    return [
        {
            "ph": "X",
            "name": timeline.label(entry),
            "cat": name,
            "pid": times.topology.machine_of(int(timeline.rank[entry])),
            "tid": _thread(int(timeline.rank[entry]), int(timeline.lane[entry])),
            "ts": (offset + float(timeline.start[entry])) * MICROSECONDS,
            "dur": float(timeline.end[entry] - timeline.start[entry]) * MICROSECONDS,
        }
        for entry in range(len(timeline))
    ]
