"""Timelines: what every track of every rank does, and when; also written as Perfetto traces."""

import json
from collections.abc import Iterator
from enum import IntEnum
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

from dyncp.plan import Op
from dyncp.simulate.flow import END, START
from dyncp.simulate.results import AttentionTimes, Simulated
from dyncp.topology import Topology


class Track(IntEnum):
    """A resource with its own line in the timeline; `*_NETWORK` is a rank's link to other nodes."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    SEND_NETWORK = 3
    RECEIVE_NETWORK = 4


class Span(NamedTuple):
    """What a track does from `start` to `end`, in seconds. The label names the division ("compute
    2"), the phase ("pack 0", "wait 0", "unpack 0"), or phase and peer ("send 1 to 5")."""

    rank: int
    track: Track
    start: float
    end: float
    label: str


def make_timeline(times: AttentionTimes) -> list[Span]:
    """Spans of all tracks that take any time, ordered by rank, track and start. The spans of a
    track do not overlap, except messages that share a link if phases are not ordered."""
    spans = [*_step_spans(times), *_message_spans(times)]
    return sorted(span for span in spans if span.end > span.start)


def _step_spans(times: AttentionTimes) -> Iterator[Span]:
    names = {Op.COMPUTE: "compute", Op.LAUNCH: "pack", Op.WAIT: "unpack"}
    columns = (times.steps[name].tolist() for name in ("op", "argument", "reached", "begin", "end"))
    for rank, op, number, reached, begin, end in zip(
        times.step_rank.tolist(), *columns, strict=True
    ):
        if op == Op.WAIT:
            yield Span(rank, Track.COMPUTE, reached, begin, f"wait {number}")
        label = {START: "start", END: "end"}.get(op) or f"{names[op]} {number}"
        yield Span(rank, Track.COMPUTE, begin, end, label)


def _message_spans(times: AttentionTimes) -> Iterator[Span]:
    """The time of every message in its first port (sending) and in its second (receiving). If
    messages share ports, both are the time that the message is in flight."""
    topology = times.topology
    for message in times.messages:
        phase, source, target = (int(message[name]) for name in ("phase", "source", "target"))
        far = bool(message["border"])
        busy = message["size"] / (topology.nic_bandwidth if far else topology.intra.bandwidth)
        if not topology.ordered_phases:
            busy = message["tail"] - message["send"]
        send, receive = float(message["send"]), float(message["receive"])
        out, into = (
            (Track.SEND_NETWORK, Track.RECEIVE_NETWORK) if far else (Track.SEND, Track.RECEIVE)
        )
        yield Span(source, out, send, send + float(busy), f"send {phase} to {target}")
        yield Span(target, into, receive, receive + float(busy), f"receive {phase} from {source}")


MICROSECONDS = 1e6
SAME_TIME = 1e-12  # seconds


def trace(simulated: Simulated, path: str | Path) -> None:
    """Writes a trace with one process per node and one thread per rank and track (more if messages
    share a link). It has one layer of every mask, first forward, then backward."""
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


def _names(topology: Topology, rows: int) -> list[dict[str, Any]]:
    """Events that name all processes and threads, with `rows` threads per track."""
    events = [
        {"ph": "M", "name": "process_name", "pid": node, "args": {"name": f"node {node}"}}
        for node in range(topology.nodes)
    ]
    for rank, track, row in product(range(topology.num_ranks), Track, range(rows)):
        name = f"rank {rank} {track.name.lower().replace('_', ' ')}"
        number = rank * len(Track) + track
        thread = {"pid": topology.node_of(rank), "tid": row * _num_tracks(topology) + number}
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": name}})
        order = {"sort_index": number * rows + row}
        events.append({"ph": "M", "name": "thread_sort_index", **thread, "args": order})
    return events


def _events(name: str, times: AttentionTimes, offset: float) -> Iterator[dict[str, Any]]:
    topology = times.topology
    for (rank, track), spans in groupby(make_timeline(times), lambda span: span[:2]):
        free = list[float]()  # when each row of the track is free
        for span in spans:
            fitting = (row for row, since in enumerate(free) if since <= span.start + SAME_TIME)
            row = next(fitting, len(free))
            free[row : row + 1] = [span.end]
            yield {
                "ph": "X",
                "name": span.label,
                "cat": name,
                "pid": topology.node_of(rank),
                "tid": row * _num_tracks(topology) + rank * len(Track) + track,
                "ts": (offset + span.start) * MICROSECONDS,
                "dur": (span.end - span.start) * MICROSECONDS,
            }
