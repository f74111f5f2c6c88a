"""Calls that are replayed as CUDA graphs: the same bits as launched calls."""

import pytest
import torch
from gpu_cases import (
    DETERMINISTIC,
    GPU,
    LENGTHS,
    MASKS,
    SHAPE,
    TRITON,
    check,
    draw_rows,
    each_choice,
    plan_of,
    reference_of,
    run,
)

from dyncp import Batch, DCPExecutor, attention
from dyncp.executor.graphs import Segment
from dyncp.kernels import why_not


def executor_of(kernel, deterministic, ranks=4, **options):
    missing = why_not(kernel, GPU)
    if missing:
        pytest.skip(missing)
    return DCPExecutor(
        virtual_ranks=ranks, device=GPU, kernel=kernel, deterministic=deterministic, **options
    )


def plan(mask="causal", solver="random"):
    return plan_of(Batch.of([MASKS[mask](length) for length in LENGTHS]), solver)


@pytest.fixture
def captures(monkeypatch):
    """How many segments were captured."""
    count = []
    original = Segment._capture
    monkeypatch.setattr(
        Segment, "_capture", lambda self, frame: (count.append(1), original(self, frame))[1]
    )
    return count


@pytest.mark.parametrize(("kernel", "deterministic"), [TRITON, DETERMINISTIC])
@pytest.mark.parametrize("solver", ["random", "bisection"])
def test_bits_are_the_same_with_and_without_graphs(kernel, deterministic, solver, captures):
    made = plan("lambda", solver)
    with_graphs, without = (
        executor_of(kernel, deterministic, graphs=graphs).prepare(made) for graphs in (True, False)
    )
    for _ in range(4):
        rows = draw_rows(with_graphs, SHAPE)
        expected = run(without, rows)
        given = run(with_graphs, rows)
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    assert captures


@each_choice
def test_every_layer_after_the_second_is_replayed(kernel, deterministic, captures):
    step = executor_of(kernel, deterministic).prepare(plan())
    rows = draw_rows(step, SHAPE)
    run(step, rows)
    assert not captures
    run(step, rows)
    count = len(captures)
    assert count
    for _ in range(3):
        run(step, rows)
    assert len(captures) == count


@each_choice
def test_graphs_of_alternating_plans_are_exact(kernel, deterministic):
    """Growing plans: the memory in which graphs were captured is replaced twice."""
    executor = executor_of(kernel, deterministic)
    small, large = reference_of("causal", lengths=(300, 40)), reference_of("causal")
    steps = [executor.prepare(plan_of(x.batch, "owner_computes")) for x in (small, large)]
    for step, reference in [(steps[0], small)] * 3 + [(steps[1], large)] * 3 + [
        (steps[0], small), (steps[1], large), (steps[0], small)
    ]:  # fmt: skip
        check(step, reference)


@each_choice
@pytest.mark.parametrize("mask", ["causal", "lambda"])
def test_work_on_parallel_streams_is_exact(kernel, deterministic, mask):
    """Launched, captured and replayed; blocks are relayed, and slots are filled again."""
    reference = reference_of(mask)
    made = plan_of(reference.batch, "random", divisions=6)
    all_slots = [part.masks["default"].backward.slots for part in made.parts]
    places = [set(zip(x.space.tolist(), x.row.tolist(), strict=True)) for x in all_slots]
    assert any(len(found) < len(slots) for found, slots in zip(places, all_slots, strict=True))
    step = executor_of(kernel, deterministic).prepare(made)
    for _ in range(5):
        check(step, reference)


def test_layers_may_have_several_scales(captures):
    step = executor_of("triton", True).prepare(plan())
    *inputs, _ = draw_rows(step, SHAPE)
    for scale in (0.1, 0.2) * 3:
        given = attention(step, *inputs, scale=scale)
        with torch.autograd.set_detect_anomaly(True):
            assert torch.equal(attention(step, *inputs, scale=scale), given)
    assert captures


def test_a_caller_may_capture_the_whole_call(captures):
    step = executor_of("triton", True).prepare(plan())
    *inputs, _ = draw_rows(step, SHAPE)
    with torch.no_grad():
        expected = attention(step, *inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            attention(step, *inputs)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                out = attention(step, *inputs)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_graphs_take_little_memory_and_give_it_back():
    executor = executor_of("triton", True)
    free = []
    for number in range(12):
        step = executor.prepare(plan(seed_mask(number)))
        rows = draw_rows(step, SHAPE)
        for _ in range(3):
            run(step, rows)
        torch.cuda.synchronize()
        del rows
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[3] - free[-1] <= 64 << 20


def seed_mask(number):
    return list(MASKS)[number % len(MASKS)]
