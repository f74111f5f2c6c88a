"""Static methods move the same bytes as the original systems, and give exact results."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Case, Tensors, assert_equal, run_dense, run_virtual
from dyncp import AttentionShape, Batch, PlannerConfig, Topology, masks
from dyncp.blocks import BlockGraph, Direction, Payload, build_graph
from dyncp.kernels import CpuKernel, ReferenceKernel
from dyncp.placement import (
    Limits,
    Placement,
    find_solver,
    measure_balance,
    minimal_bytes,
    static_candidates,
)
from dyncp.placement.megatron_hybrid import group_sizes
from dyncp.plan import Layout, Op, assemble_plan
from dyncp.planner import plan_with
from dyncp.schedule import Schedule, build_schedule
from dyncp.verify import check_plan, verify_plan
from sizes import draws
from strategies import masks_of, named_masks_of

KV, DKV = Payload.KV, Payload.DKV


@dataclass(frozen=True)
class Moved:
    """A method's schedule of one direction, and its bytes."""

    graph: BlockGraph
    placement: Placement
    schedule: Schedule
    total: int
    between_nodes: int


def move(
    name: str,
    batch: Batch,
    topology: Topology,
    shape: AttentionShape,
    direction: Direction = Direction.FORWARD,
) -> Moved:
    solver = find_solver(name).fitted(shape, topology)
    sizes = solver.block_sizes(batch.lengths, topology.num_ranks).tolist()
    graph = build_graph(batch, shape, sizes, solver.head_groups or 1)
    placement = solver.place(graph, topology, Limits(), 0)
    schedule = build_schedule(graph, placement, "default", direction, 4)
    moved = schedule.transfers
    size = graph.payload_bytes[moved.kind, moved.head_group] * graph.blocks.tokens[moved.block]
    nodes = [x // topology.ranks_per_node for x in (moved.source, moved.target)]
    between = int(size[nodes[0] != nodes[1]].sum())
    return Moved(graph, placement, schedule, int(size.sum()), between)


BIG = AttentionShape(8, 2, 128, "bf16")


@pytest.mark.parametrize(
    ("name", "total", "between"),
    [
        ("ring", 4161, 520),
        ("zigzag", 4161, 520),
        ("all_gather", 4161, 3221),
        ("all_gather_by_node", 4161, 403),
        # 2349 and the log-sum-exps of half of the heads, 4 bytes per token and head
        ("transformer_engine/h2", 2349 + 2, 503),
        ("loongtrain/h2", 2349 + 2, 589),
        ("ulysses/cp2", 336 + 2, 0),
        ("zigzag/cp8", 940, 0),
        ("ptrr", 4161, 3221),
        ("megatron_hybrid", 4161, 520),
    ],
)
def test_megabytes_of_131072_tokens_on_4_nodes_with_8_ranks(name, total, between):
    moved = move(name, Batch.of([masks.causal(131072)]), Topology(4, 8), BIG)
    assert moved.total == pytest.approx(total * 1e6, abs=0.5e6)
    assert moved.between_nodes == pytest.approx(between * 1e6, abs=0.5e6)


def payloads(graph: BlockGraph, *kinds: Payload) -> int:
    """Bytes of all tokens and heads."""
    return int(graph.payload_bytes[list(kinds)].sum()) * graph.batch.num_tokens


def formula(name: str, graph: BlockGraph, direction: Direction, num_ranks: int) -> int:
    """Closed formulas; the mask is not in them. Head groups are equally large."""
    method, _, degrees = name.partition("/")
    degree = int(degrees.partition("h")[0].removeprefix("cp") or num_ranks)
    heads = len(graph.head_groups)
    backward = direction is Direction.BACKWARD
    round_trip = payloads(graph, KV, DKV) if backward else payloads(graph, KV)
    if method == "ulysses":
        degree, hops = heads, 0
    elif method in ("loongtrain", "transformer_engine"):
        hops = degree // heads - 1
    elif method == "megatron_hybrid":
        sizes = group_sizes(graph.batch.lengths, num_ranks, None)
        per_token = round_trip // graph.batch.num_tokens
        return sum((sizes - 1) * graph.batch.lengths) * per_token
    else:
        return (degree - 1) * round_trip
    q = (Payload.Q_DOUT, Payload.DQ) if backward else (Payload.Q, Payload.OUT)
    return hops * round_trip + (payloads(graph, *q) + round_trip) * (heads - 1) // heads


FORMULAS = [
    "ring",
    "ring/cp2",
    "zigzag",
    "zigzag/cp3",
    "all_gather",
    "all_gather/cp2",
    "all_gather_by_node",
    "ptrr",
    "ptrr/cp3",
    "ulysses",
    "loongtrain",
    "loongtrain/cp6h3",
    "transformer_engine",
    "transformer_engine/cp3h3",
    "megatron_hybrid",
    "zigzag/cp1",
]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("direction", list(Direction))
def test_bytes_equal_their_formulas(name, direction):
    shape, topology = AttentionShape(12, 6, 16, "bf16", "fp32"), Topology(2, 3)
    batch = Batch.of([masks.causal(n) for n in (290, 41, 7, 130)])
    moved = move(name, batch, topology, shape, direction)
    assert moved.total == formula(moved.placement.solver, moved.graph, direction, 6)


@draws(40)
@given(
    data=st.data(),
    name=st.sampled_from([n for n in FORMULAS if not n.startswith("ulysses")]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    direction=st.sampled_from(list(Direction)),
)
def test_bytes_do_not_depend_on_masks(data, name, lengths, direction):
    shape = AttentionShape(6, 6, 4, "bf16")
    batch = Batch.of([data.draw(masks_of(n)) for n in lengths])
    moved = move(name, batch, Topology(2, 3), shape, direction)
    assert moved.total == formula(moved.placement.solver, moved.graph, direction, 6)


def test_magi_moves_only_what_its_placement_needs():
    batch = Batch.of([masks.causal(600), masks.causal(90)])
    for direction in Direction:
        moved = move("magi", batch, Topology(2, 2), BIG, direction)
        needed = minimal_bytes(moved.graph, moved.placement, "default", direction)
        assert moved.total == needed
        assert set(moved.schedule.transfers.kind.tolist()) <= {KV, DKV}


@pytest.mark.parametrize("direction", list(Direction))
def test_bytes_between_nodes_follow_from_rings_and_groups(direction):
    """6 nodes of 2 ranks: a ring crosses 6 links, and a block does not cross the one that leads
    home; an all-gather reaches 10 ranks elsewhere, or 5 nodes."""
    batch, topology = Batch.of([masks.causal(240), masks.full(17)]), Topology(6, 2)
    per_token = 2 * 512 if direction is Direction.BACKWARD else 512  # KV, and dKV
    shape = AttentionShape(8, 2, 64, "bf16")
    for name in ("ring", "zigzag"):
        moved = move(name, batch, topology, shape, direction)
        first = moved.placement.block_rank % 2 == 0  # the link into this rank crosses
        crossings = np.where(first, 5, 6) * moved.graph.blocks.tokens
        if direction is Direction.FORWARD:
            assert moved.between_nodes == crossings.sum() * per_token
        else:  # dKV does not use the link that leads away from home
            away = np.where(~first, 5, 6) * moved.graph.blocks.tokens
            assert moved.between_nodes == (crossings + away).sum() * 512
    for name, ranks in (("all_gather", 10), ("all_gather_by_node", 5)):
        moved = move(name, batch, topology, shape, direction)
        assert moved.between_nodes == ranks * 257 * per_token


@pytest.mark.parametrize("name", ["ring", "zigzag/cp4", "transformer_engine/cp4h2", "loongtrain"])
def test_blocks_hop_between_neighbours_round_their_ring(name):
    batch, topology = Batch.of([masks.causal(99), masks.causal(5)]), Topology(2, 4)
    moved = move(name, batch, topology, AttentionShape(4, 2, 8), Direction.BACKWARD)
    transfers, traffic = moved.schedule.transfers, moved.placement.traffic
    assert traffic is not None
    routes: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    columns = (transfers.kind, transfers.block, transfers.head_group)
    for *key, source, target in zip(*columns, transfers.source, transfers.target, strict=True):
        routes.setdefault(tuple(map(int, key)), []).append((int(source), int(target)))
    for block, group in np.ndindex(traffic.home.shape):
        ring, home = traffic.rings[traffic.ring[block, group]], int(traffic.home[block, group])
        start = ring.index(home)
        round_trip = [*ring[start:], *ring[:start], home]
        links = list(pairwise(round_trip))
        owner = int(moved.placement.block_rank[block])
        there, back = ([], []) if owner == home else ([(owner, home)], [(home, owner)])
        assert routes.get((KV, block, group), []) == there + links[:-1]
        assert routes.get((DKV, block, group), []) == links[1:] + back


def test_all_gathers_use_the_divisions_asked_for_and_rings_one_per_hop():
    batch, topology = Batch.of([masks.full(256)]), Topology(1, 8)
    assert move("all_gather", batch, topology, BIG).schedule.num_divisions == 4
    assert move("ring", batch, topology, BIG).schedule.num_divisions == 8
    assert move("loongtrain/h2", batch, topology, BIG).schedule.num_divisions == 5
    assert move("all_gather_by_node", batch, Topology(2, 4), BIG).schedule.num_divisions == 3
    for name in ("all_gather", "ring", "loongtrain/h2"):
        tiles = np.bincount(move(name, batch, topology, BIG).schedule.tile_division)
        assert (tiles > 0).all()


def test_relays_between_nodes_are_spread_over_their_ranks():
    batch = Batch.of([masks.causal(480)])
    transfers = move("all_gather_by_node", batch, Topology(3, 4), BIG).schedule.transfers
    crossing = transfers.source // 4 != transfers.target // 4
    for rank in (transfers.source[crossing], transfers.target[crossing]):
        assert len(set(np.bincount(rank, minlength=12).tolist())) == 1


def test_passing_on_waits_for_what_arrives_also_without_tiles():
    """Rank 0 of a causal contiguous ring computes its own chunk only. Phases of KV are 0 1 3 of
    dKV 2 4: launch 4 passes on the gradients received in 2, for the block received in 1."""
    solver, batch = find_solver("ring"), Batch.of([masks.causal(12)])
    shape, config = AttentionShape(2, 1, 3, "fp64"), PlannerConfig(layout=Layout(4))
    plan = plan_with(solver, batch, Topology(1, 3), shape, config)
    program = plan.parts[0].masks["default"].backward
    assert program is not None
    launch, wait, compute = Op.LAUNCH, Op.WAIT, Op.COMPUTE
    assert program.instructions.tolist() == [
        *([launch, 0], [compute, 0], [wait, 0], [launch, 1]),
        *([launch, 2], [wait, 1], [wait, 2], [launch, 3], [wait, 3]),
    ]
    check_plan(plan, batch)


def test_only_static_plans_may_send_empty_partials():
    shape, topology, batch = AttentionShape(2, 1, 3), Topology(1, 3), Batch.of([masks.causal(12)])
    moved = move("ring", batch, topology, shape)
    graph, placement = moved.graph, replace(moved.placement, static=False)
    schedules = [
        build_schedule(graph, placement, "default", direction, 4) for direction in Direction
    ]
    balance = measure_balance(graph, placement, Limits())
    plan = assemble_plan(graph, placement, {"default": tuple(schedules)}, balance, Layout(4))
    sentences = [v.sentence for v in verify_plan(plan, batch)]
    assert any("no tile has contributed" in s for s in sentences)
    assert any("the plan is not static" in s for s in sentences)


FIXED = Batch.of([masks.full(70), masks.causal(23), masks.lambda_shaped(40, sinks=2, window=9)])
SIX_HEADS, SIX_RANKS = AttentionShape(12, 6, 4, "fp64"), Topology(2, 3)


@pytest.mark.parametrize(
    "name", [s.name for s in static_candidates(FIXED.lengths, SIX_HEADS, SIX_RANKS)]
)
def test_every_candidate_gives_a_plan_without_violations(name):
    config = PlannerConfig(layout=Layout(8))
    plan = plan_with(find_solver(name), FIXED, SIX_RANKS, SIX_HEADS, config)
    assert plan.parts[0].solver == name
    assert verify_plan(plan, FIXED) == []


@st.composite
def static_cases(draw) -> Case:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    names = draw(st.sampled_from([("default",), ("default", "local")]))
    batch = Batch.of([draw(named_masks_of(n, names)) for n in lengths])
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    shape = AttentionShape(kv_heads * draw(st.integers(1, 2)), kv_heads, 4, "fp64")
    nodes = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 3), (3, 2), (1, 8)]))
    topology = Topology(*nodes)
    solver = draw(st.sampled_from(static_candidates(lengths, shape, topology)))
    config = PlannerConfig(
        block_size=draw(st.none() | st.integers(2, 16)),
        head_groups=draw(st.integers(1, kv_heads)),
        divisions=draw(st.integers(2, 5)),
        layout=Layout(draw(st.sampled_from([1, 8])), draw(st.sampled_from([1, 4]))),
    )
    return Case(batch, plan_with(solver, batch, topology, shape, config), shape, 0)


@draws(80)
@given(case=static_cases(), kernel=st.sampled_from([CpuKernel(), ReferenceKernel(4)]))
def test_every_method_is_verified_and_equals_dense_fp64_attention(case, kernel):
    check_plan(case.plan, case.batch)
    tensors = Tensors.draw(case)
    for name in case.batch.masks:
        given_results = run_virtual(case, name, tensors, kernel=kernel)
        assert_equal(given_results, run_dense(case, name, tensors, torch.float64), 1e-12)
