"""Timeline: what every lane of every rank does, and when."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.plan import Op
from dyncp.simulate.attention_times import AttentionTimes
from dyncp.simulate.flow import END, START
from dyncp.simulate.network import is_inside


class Lane(IntEnum):
    """What can be busy on its own; `*_NETWORK` is a rank's way to other machines."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    SEND_NETWORK = 3
    RECEIVE_NETWORK = 4


class Activity(IntEnum):
    """What a lane does. COMPUTE is about a division, START and END are about the whole program, the
    others about a phase."""

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
    """One entry per stretch of time above 0, ordered by rank, lane and start. `number` is the
    division or phase, `peer` the other rank of a message (else -1). Seconds."""

    rank: Int64
    lane: Int64
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
    """All lanes of all ranks. A lane never does two things at once, but for messages that share a
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
        lane, what = np.full_like(rank, Lane.COMPUTE), np.full_like(rank, activity)
        return rank, lane, what, number, np.full_like(rank, -1), start[chosen], end[chosen]

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
        rank: Int64, peer: Int64, lanes: tuple[Lane, Lane], activity: Activity, start: Float64
    ) -> Entries:
        lane = np.where(inside, *lanes).astype(np.int64)
        what = np.full_like(rank, activity)
        return rank, lane, what, messages.phase, peer, start, start + busy

    source, target = messages.source, messages.target
    send, receive = times.messages["send"], times.messages["receive"]
    return [
        entries(source, target, (Lane.SEND, Lane.SEND_NETWORK), Activity.SEND, send),
        entries(target, source, (Lane.RECEIVE, Lane.RECEIVE_NETWORK), Activity.RECEIVE, receive),
    ]
