"""Results: AttentionTimes of one direction of one layer, Simulated of a whole step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.plan import Op
from dyncp.simulate.event_state import Records, make_event_state
from dyncp.simulate.events import run_events
from dyncp.simulate.flow import Flow
from dyncp.simulate.shared import run_shared
from dyncp.topology import Topology


@dataclass(frozen=True, eq=False)
class AttentionTimes:
    """Times in seconds from the start, when all ranks begin together.

    `steps` are the instructions, `messages` the messages and `ports` the ports with their times, as
    records (see state.py; ports are numbered in network.py).
    """

    flow: Flow
    topology: Topology
    steps: Records
    messages: Records
    ports: Records

    @cached_property
    def step_rank(self) -> Int64:
        """Rank of every instruction."""
        return self.flow.step_rank

    @cached_property
    def rank_seconds(self) -> Float64:
        """When every rank is done."""
        done = np.zeros(self.flow.num_ranks)
        np.maximum.at(done, self.step_rank, self.steps["end"])
        return done

    @cached_property
    def rank_compute_seconds(self) -> Float64:
        """Time every rank spends in kernels."""
        spent = np.where(
            self.flow.programs.op == Op.COMPUTE, self.steps["end"] - self.steps["begin"], 0
        )
        return self._per_rank(spent)

    @cached_property
    def rank_waiting_seconds(self) -> Float64:
        """Time every rank waits for messages, before its last instruction ends."""
        waited = self.steps["begin"] - self.steps["reached"]
        return self._per_rank(waited)

    @cached_property
    def rank_host_seconds(self) -> Float64:
        """Time every rank has nothing to do because the host has issued nothing more."""
        before = np.concatenate([np.zeros(1), self.steps["end"][:-1]])[: len(self.steps)]
        before[self.flow.programs.first[:-1][np.diff(self.flow.programs.first) > 0]] = 0.0
        return self._per_rank(self.steps["reached"] - before)

    def _per_rank(self, step_seconds: Float64) -> Float64:
        total = np.bincount(self.step_rank, step_seconds, self.flow.num_ranks)
        return total.astype(np.float64)

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return float(self.rank_seconds.max())

    @property
    def compute_seconds(self) -> float:
        """Kernel time of the rank that has most."""
        return float(self.rank_compute_seconds.max())

    @property
    def exposed_seconds(self) -> float:
        """What there is beside kernels: the whole time minus the most kernel time of a rank.
        Waiting, for messages and the host, and row work all count, as far as they are not
        hidden."""
        return self.seconds - self.compute_seconds


def run_flow(flow: Flow, topology: Topology) -> AttentionTimes:
    topology.check_ranks(flow.num_ranks, "plan")
    state = make_event_state(flow, topology)
    run = run_events if topology.ordered_phases else run_shared
    run(*state)
    stuck = np.flatnonzero(state.ranks["next"] < state.ranks["last"])
    if len(stuck):
        step = state.steps[state.ranks["next"][stuck[0]]]
        raise ValueError(
            f"ranks {stuck.tolist()} never finish; rank {stuck[0]} waits for phase "
            f"{step['argument']}: the schedule's phases do not order"
        )
    return AttentionTimes(flow, topology, state.steps, state.messages, state.ports)


Both = tuple[AttentionTimes, AttentionTimes | None]


@dataclass(frozen=True, eq=False)
class Simulated:
    """Seconds of a step.

    `attention` has the forward and backward times of one layer per mask name, `layers` how many
    layers use that mask. `token_seconds` is the per-token work of the fullest rank, forward and
    backward, 0 without a model. `ideal_seconds` is the step without communication and kernel-call
    overhead and with all work spread evenly.
    """

    attention: Mapping[str, Both]
    layers: Mapping[str, float]
    token_seconds: float
    ideal_seconds: float

    @property
    def num_layers(self) -> float:
        return sum(self.layers.values())

    @property
    def forward_seconds(self) -> float:
        """One attention layer; the mean over layers when they have different masks."""
        return self._per_layer(0, "seconds")

    @property
    def backward_seconds(self) -> float:
        """As forward_seconds; 0 in plans for evaluation."""
        return self._per_layer(1, "seconds")

    @property
    def layer_seconds(self) -> float:
        """One attention layer, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def exposed_seconds(self) -> float:
        """What communication adds to one attention layer, forward and backward together."""
        return self._per_layer(0, "exposed_seconds") + self._per_layer(1, "exposed_seconds")

    @property
    def attention_seconds(self) -> float:
        """All attention layers, forward and backward."""
        return self.num_layers * self.layer_seconds

    @property
    def step_seconds(self) -> float:
        """All attention layers and the per-token work, forward and backward."""
        return self.attention_seconds + self.token_seconds

    def runs(self) -> Iterator[tuple[str, AttentionTimes]]:
        """Every simulated direction with a name for it, forward ones first."""
        for side, direction in enumerate(("forward", "backward")):
            for name, both in self.attention.items():
                times = both[side]
                if times is not None:
                    yield f"{name} {direction}", times

    def _per_layer(self, side: int, field: str) -> float:
        total = 0.0
        for name, both in self.attention.items():
            times = both[side]
            if times is not None and self.layers[name]:
                total += self.layers[name] * float(getattr(times, field))
        return total / self.num_layers
