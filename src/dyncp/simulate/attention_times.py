"""AttentionTimes: what the event loop found for one direction of one attention layer."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.plan import Op
from dyncp.simulate.events import run_events
from dyncp.simulate.flow import Flow
from dyncp.simulate.shared import run_shared
from dyncp.simulate.world import Records, make_world
from dyncp.topology import Topology


@dataclass(frozen=True, eq=False)
class AttentionTimes:
    """Times in seconds from the start, when all ranks begin together.

    `steps` are the instructions, `messages` the messages and `ports` the ports with their times, as
    records (see world.py; ports are numbered in network.py).
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
    def rank_row_seconds(self) -> Float64:
        """Time every rank packs, unpacks, merges and copies."""
        other = self.flow.programs.op != Op.COMPUTE
        return self._per_rank(np.where(other, self.steps["end"] - self.steps["begin"], 0))

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
    world = make_world(flow, topology)
    run = run_events if topology.ordered_phases else run_shared
    run(*world)
    stuck = np.flatnonzero(world.ranks["next"] < world.ranks["last"])
    if len(stuck):
        step = world.steps[world.ranks["next"][stuck[0]]]
        raise ValueError(
            f"ranks {stuck.tolist()} never finish; rank {stuck[0]} waits for phase "
            f"{step['argument']}: the schedule's phases do not order"
        )
    return AttentionTimes(flow, topology, world.steps, world.messages, world.ports)
