"""Random placements with their schedules, and small flows written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, masks
from dyncp.blocks import BlockGraph, Direction, build_graph
from dyncp.cost import CostModel, Profile, find_profile
from dyncp.placement import Limits, Placement, find_solver, measure_balance
from dyncp.plan import Layout, Op, Plan, assemble_plan
from dyncp.schedule import Schedule, build_schedule
from dyncp.simulate import AttentionTimes, Flow, FlowMessages, Programs, run_flow
from dyncp.topology import Link, Topology, preset
from kernels_only import KERNELS_ONLY

SOLVERS = ("owner_computes", "zigzag", "random")


@dataclass(frozen=True)
class Case:
    graph: BlockGraph
    placement: Placement
    schedules: dict[str, tuple[Schedule, Schedule]]
    topology: Topology
    cost: CostModel

    def plan(self) -> Plan:
        balance = measure_balance(self.graph, self.placement, Limits())
        return assemble_plan(self.graph, self.placement, self.schedules, balance, Layout())


def make_case(
    lengths: list[int],
    topology: Topology,
    solver: str,
    *,
    profile: Profile | None = None,
    head_groups: int = 1,
    divisions: int = 4,
    seed: int = 0,
) -> Case:
    shape = AttentionShape(8, 2, 64)
    batch = Batch.of([masks.causal(n) for n in lengths])
    chosen = find_solver(solver).fitted(shape, topology)
    sizes = chosen.block_sizes(batch.lengths, topology.num_ranks).tolist()
    graph = build_graph(batch, shape, sizes, chosen.head_groups or head_groups)
    placement = chosen.place(graph, topology, Limits(), seed)
    forward, backward = (
        build_schedule(graph, placement, "default", direction, divisions) for direction in Direction
    )
    cost = CostModel(profile or KERNELS_ONLY, shape)
    return Case(graph, placement, {"default": (forward, backward)}, topology, cost)


@st.composite
def cases(draw: Any) -> Case:
    """Up to 4 sequences of up to 3,000 tokens on up to 3 nodes with up to 3 ranks."""
    topology = preset(
        draw(st.sampled_from(["p4de", "h200", "cpu_gloo"])),
        nodes=draw(st.integers(1, 3)),
        ranks_per_node=draw(st.integers(1, 3)),
    )
    if draw(st.booleans()):
        topology = topology.jittered(0.5, draw(st.integers(0, 99)))
    return make_case(
        draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4)),
        topology,
        draw(st.sampled_from(SOLVERS)),
        profile=find_profile(topology.name),
        head_groups=draw(st.integers(1, 2)),
        divisions=draw(st.integers(2, 5)),
        seed=draw(st.integers(0, 99)),
    )


Message = tuple[int, int, int, float]  # phase, source, target, bytes
Step = tuple[Op, int, float]  # instruction, argument, seconds


def run_by_hand(
    programs: list[list[Step]],
    messages: list[Message],
    topology: Topology,
    *,
    host: float = 0.0,
    slowdown: float = 1.0,
) -> AttentionTimes:
    """Simulates programs and messages that a test wrote down; `host` seconds per instruction, and
    computing `slowdown` times longer while messages are in flight."""
    steps = [step for program in programs for step in program]
    first = np.cumsum([0, *map(len, programs)])
    op, argument = (np.array([int(s[i]) for s in steps], np.int64) for i in (0, 1))
    phase, source, target = (np.array([m[i] for m in messages], np.int64) for i in (0, 1, 2))
    size = np.array([m[3] for m in messages], np.float64)
    flow = Flow(
        len(programs),
        int(phase.max(initial=-1)) + 1,
        Programs(op, argument, first),
        np.array([s[2] for s in steps], np.float64),
        FlowMessages(phase, source, target, size),
        0.0,
        host * (1 + np.concatenate([np.arange(len(program)) for program in programs])),
        slowdown,
    )
    return run_flow(flow, topology)


def exchange(num_ranks: int, messages: list[Message], topology: Topology) -> AttentionTimes:
    """Every rank launches phase 0 at once, and receivers wait for it."""
    receivers = {target for _, _, target, _ in messages}
    launch, wait = (Op.LAUNCH, 0, 0.0), (Op.WAIT, 0, 0.0)
    programs = [[launch, wait] if r in receivers else [launch] for r in range(num_ranks)]
    return run_by_hand(programs, messages, topology)


def simple_topology(nodes: int, ranks: int, nics: int = 1) -> Topology:
    """Latency 1 s and 10 B/s inside a node; 2 s and 4 B/s between nodes."""
    return Topology(nodes, ranks, Link(1.0, 10.0), Link(2.0, 4.0), nics)
