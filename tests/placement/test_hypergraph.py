"""The hypergraph solver, by its properties, and what happens when its worker process fails."""

import json
import multiprocessing
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Case, Tensors, assert_equal, run_dense, run_virtual
from dyncp import AttentionShape, Batch, PlannerConfig, Topology, masks, plan_batch
from dyncp.blocks import BlockGraph, Direction, build_graph
from dyncp.placement import (
    Limits,
    Placement,
    bisection,
    check_placement,
    find_solver,
    measure_balance,
    minimal_bytes,
)
from dyncp.placement import hypergraph_worker as worker_file
from dyncp.placement.hypergraph import (
    Hypergraph,
    SolverError,
    build_hypergraph,
    partition,
    place_hypergraph,
)
from dyncp.placement.problem import find_cells, make_problem
from dyncp.verify import check_plan
from sizes import draws, full
from strategies import masks_of

SHAPE = AttentionShape(8, 2, 128)
LIMITS = Limits(0.1, 0.2)
LONG_TAILED = np.random.default_rng(3).lognormal(np.log(3000), 1.3, 24).clip(256, 40000).astype(int)
installed = pytest.mark.skipif(
    find_spec("mtkahypar") is None,
    reason="mtkahypar is not installed: pip install 'dyncp[hypergraph]'",
)


def graph_of(lengths, mask=masks.causal, block_size=1024) -> BlockGraph:
    batch = Batch.of([mask(int(n)) for n in lengths])
    return build_graph(batch, SHAPE, [block_size] * len(batch.lengths))


def hypergraph_of(graph: BlockGraph) -> Hypergraph:
    problem = make_problem(graph)
    return build_hypergraph(problem, find_cells(problem), 1.0)


def place(graph: BlockGraph, topology: Topology, seed: int = 0) -> Placement:
    placement = place_hypergraph(graph, topology, LIMITS, seed)
    check_placement(graph, placement)
    return placement


def same(a: Placement, b: Placement) -> bool:
    tiles = (a.tile_rank[name] == b.tile_rank[name] for name in a.tile_rank)
    return bool((a.block_rank == b.block_rank).all()) and all(t.all() for t in tiles)


def ring_of(vertices: int) -> Hypergraph:
    """A hypergraph of which two parts cut at least two edges."""
    pins = np.stack([np.arange(vertices), np.roll(np.arange(vertices), -1)], axis=1).ravel()
    ones = np.ones(vertices, np.int64)
    return Hypergraph(ones, ones, np.arange(0, 2 * vertices + 1, 2), pins)


def run_fresh(code: str, *arguments: str) -> str:
    """What `code` prints in a new process that can import this file."""
    folders = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONPATH": folders},
    )
    return result.stdout.strip()


def test_blocks_with_their_diagonal_tile_and_other_tiles_are_vertices():
    batch = Batch.of([masks.causal(20), masks.causal(10)])
    graph = build_graph(batch, AttentionShape(2, 1, 4), [10, 10])
    built = hypergraph_of(graph)
    edges = [built.pins[a:b].tolist() for a, b in zip(built.start, built.start[1:], strict=False)]
    assert edges == [[0], [1, 3], [2], [0, 3], [1], [2]]
    work = built.vertex_weight / built.vertex_weight.sum()
    assert work == pytest.approx(np.array([55, 55, 55, 100]) / 265, rel=1e-6)
    assert built.edge_weight[0] > built.edge_weight[3]  # queries and outputs over keys and values


def test_a_part_of_a_hypergraph_has_the_edges_that_are_left():
    part = ring_of(5).restrict(np.array([4, 3, 1]))
    assert part.pins.tolist() == [1, 0]  # only the edge from 3 to 4 has both ends
    assert part.start.tolist() == [0, 2]
    assert len(part.vertex_weight) == 3


def test_without_the_package_the_solver_is_found_and_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    solver = find_solver("hypergraph")
    with pytest.raises(SolverError, match=r"'hypergraph'.*pip install 'dyncp\[hypergraph\]'"):
        solver.place(graph_of([3000]), Topology(1, 2), LIMITS, 0)


@installed
@draws(15)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    nodes=st.integers(1, 3),
    ranks=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_any_batch_gets_a_total_map_that_depends_on_its_arguments_only(
    data, lengths, nodes, ranks, seed
):
    chosen = [data.draw(masks_of(n)) for n in lengths]
    graph = build_graph(Batch.of(chosen), SHAPE, [data.draw(st.integers(1, 20)) for _ in lengths])
    first, second = (place(graph, Topology(nodes, ranks), seed) for _ in range(2))
    assert same(first, second)


@installed
@draws(20)
@given(
    seed=st.integers(0, 999),
    sequences=st.integers(1, 12),
    mask=st.sampled_from([masks.causal, masks.lambda_shaped, masks.causal_blockwise]),
    topology=st.sampled_from([Topology(1, 4), Topology(2, 4), Topology(2, 8), Topology(3, 2)]),
)
def test_limits_that_bisection_meets_are_met(seed, sequences, mask, topology):
    lengths = np.random.default_rng(seed).lognormal(8, 1, sequences).clip(100, 30000)
    graph = graph_of(lengths, mask, block_size=512)
    if not measure_balance(graph, bisection.place(graph, topology, LIMITS, 0), LIMITS).reason:
        balance = measure_balance(graph, place(graph, topology, seed), LIMITS)
        assert not balance.reason, balance.reason


@installed
@pytest.mark.parametrize("mask", [masks.causal, masks.lambda_shaped, masks.shared_question])
@pytest.mark.parametrize("lengths", [LONG_TAILED, full([65536]), full([4096] * 16)], ids=str)
def test_both_limits_hold_on_long_tailed_single_and_uniform_batches(lengths, mask):
    graph = graph_of(lengths, mask)
    balance = measure_balance(graph, place(graph, Topology(2, 8)), LIMITS)
    assert not balance.reason, balance.reason


@installed
def test_a_fresh_process_gives_the_same_placement():
    code = """
import json, sys
from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import build_graph
from dyncp.placement import Limits, find_solver
lengths = json.loads(sys.argv[1])
batch = Batch.of([masks.causal(length) for length in lengths])
graph = build_graph(batch, AttentionShape(8, 2, 128), [1024] * len(lengths))
placement = find_solver("hypergraph").place(graph, Topology(2, 4), Limits(0.1, 0.2), 5)
print(placement.block_rank.tolist(), placement.tile_rank["default"].tolist())
"""
    here = place(graph_of(LONG_TAILED), Topology(2, 4), 5)
    expected = f"{here.block_rank.tolist()} {here.tile_rank['default'].tolist()}"
    assert run_fresh(code, json.dumps(LONG_TAILED.tolist())) == expected


@installed
def test_the_preset_gives_the_same_parts_for_any_number_of_threads():
    code = """
import json, sys
from dyncp.placement.hypergraph_worker import partition
print(partition(json.loads(sys.argv[2]), 8, 0.1, int(sys.argv[1])))
"""
    graph = graph_of(LONG_TAILED)
    built = hypergraph_of(graph).restrict(np.arange(len(graph.blocks) + 100))
    given = json.dumps([array.tolist() for array in built])
    one, two = (run_fresh(code, threads, given) for threads in ("1", "2"))
    assert one == two
    assert set(range(8)) == set(json.loads(one))


@installed
def test_seeds_give_different_placements():
    graph = graph_of(LONG_TAILED)
    first, second = (place(graph, Topology(2, 4), seed) for seed in (0, 1))
    assert not same(first, second)


@installed
def test_one_rank_takes_everything_and_nothing_moves():
    graph = graph_of([3000, 700])
    placement = place(graph, Topology(1, 1))
    assert not placement.block_rank.any()
    assert minimal_bytes(graph, placement, "default", Direction.BACKWARD) == 0


@installed
def test_fewer_blocks_than_ranks_are_placed():
    place(graph_of([100]), Topology(2, 8))
    place(graph_of([1500, 100]), Topology(4, 8))


@installed
def test_a_batch_without_a_single_tile_still_shares_its_tokens():
    nothing = masks.Mask(np.zeros((64, 1, 2), np.int32))
    graph = build_graph(Batch.of([nothing]), SHAPE, [8])
    assert len(graph.tiles["default"]) == 0
    placement = place(graph, Topology(2, 2))
    assert np.bincount(placement.block_rank).tolist() == [2, 2, 2, 2]


@installed
def test_several_masks_share_owners_and_both_are_placed():
    named = [{"default": masks.causal(n), "local": masks.sliding_window(n, window=64)}
             for n in (3000, 800, 500)]  # fmt: skip
    graph = build_graph(Batch.of(named), SHAPE, [128, 800, 500], 2)
    assert set(place(graph, Topology(1, 4)).tile_rank) == {"default", "local"}


@installed
def test_uniform_batches_that_fit_move_nothing_between_nodes():
    graph = graph_of([8192] * 4, block_size=512)
    tiles, placement = graph.tiles["default"], place(graph, Topology(4, 4))
    assert (placement.block_rank[tiles.k_block] // 4 == placement.tile_rank["default"] // 4).all()


@installed
def test_a_plan_is_verified_and_gives_exact_results():
    batch = Batch.of([masks.causal(90), masks.causal_blockwise(60, block=8), masks.causal(7)])
    shape = AttentionShape(4, 2, 8, "fp64")
    config = PlannerConfig("hypergraph", block_size=8, limits=Limits(0.2, 0.2))
    case = Case(batch, plan_batch(batch, Topology(2, 2), shape, config), shape, seed=1)
    check_plan(case.plan, batch)
    tensors = Tensors.draw(case)
    dense = run_dense(case, "default", tensors, torch.float64)
    assert_equal(run_virtual(case, "default", tensors, kernel="reference"), dense, 1e-12)


@installed
def test_several_hypergraphs_are_split_as_each_by_itself():
    together = partition([ring_of(60), ring_of(90)], 2, 0.1, 60.0)
    assert [part.tolist() for part in together] == [
        partition([ring_of(size)], 2, 0.1, 60.0)[0].tolist() for size in (60, 90)
    ]


def write_worker(monkeypatch, folder: Path, code: str) -> None:
    path = folder / "worker.py"
    path.write_text(code)
    monkeypatch.setattr(worker_file, "__file__", str(path))


def test_a_hanging_worker_is_killed_and_reported(monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    write_worker(monkeypatch, tmp_path, code)
    # More bytes than a pipe holds: sending must not hang either.
    with pytest.raises(SolverError, match=r"'hypergraph'.*no answer from its worker in 1 s"):
        partition([ring_of(60_000)], 2, 0.1, 1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.abort()", "by SIGABRT"),
        ("import sys; sys.stdin.buffer.read(); sys.exit(3)", "with exit code 3"),
    ],
)
def test_a_worker_that_crashes_is_reported_with_how_it_ended(monkeypatch, tmp_path, code, how):
    write_worker(monkeypatch, tmp_path, code)
    with pytest.raises(SolverError, match=f"its worker process ended {how}"):
        partition([ring_of(60_000)], 2, 0.1, 60.0)


@installed
def test_what_the_library_refuses_is_reported():
    broken = Hypergraph(*(np.array(x, np.int64) for x in ([1, 1], [1], [0, 2], [0, 7])))
    with pytest.raises(SolverError, match="mtkahypar failed: "):
        partition([broken], 2, 0.1, 60.0)


def place_in_child(connection) -> None:
    placement = place(graph_of([8000], block_size=500), Topology(1, 4))
    connection.send(placement.block_rank.tolist())


@installed
@pytest.mark.parametrize("method", ["fork", full("spawn")])
def test_daemonic_processes_plan_too(method):
    expected = place(graph_of([8000], block_size=500), Topology(1, 4))
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    child = context.Process(target=place_in_child, args=(theirs,), daemon=True)
    child.start()
    assert ours.poll(120), "the child gave no placement"
    assert ours.recv() == expected.block_rank.tolist()
    child.join(60)
