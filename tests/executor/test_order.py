"""The order in which work is given to a GPU with graphs: few stretches, and nothing before what it
needs."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import Tensors, assert_equal, cases, run_dense, run_virtual
from dyncp import Topology
from dyncp.executor.graphs import Graphs
from dyncp.executor.kernel_calls import lower_program
from dyncp.executor.order import (
    START,
    Compute,
    Launch,
    Mark,
    RowWork,
    Stretch,
    Wait,
    long_stretches,
    program_order,
    ready_times,
)
from dyncp.kernels import IndexArrays, ReferenceKernel
from dyncp.plan import Direction, Op
from kernel_styles import CollectingReference, RoundingKernel

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
L, W, C = Op.LAUNCH, Op.WAIT, Op.COMPUTE


def items(points):
    return [point.item for point in points]


def given_to_device(points):
    """What the device is given, in order; launches are the messages'."""
    found = []
    for item in items(points):
        if isinstance(item, Stretch):
            found += item.items
        elif not isinstance(item, Launch):
            found.append(item)
    return found


def launched(points):
    return [phase for item in items(points) if isinstance(item, Launch) for phase in item.phases]


def check(instructions, ready, row_work):
    plain, long = (f(instructions, ready, row_work) for f in (program_order, long_stretches))
    assert given_to_device(long) == given_to_device(plain)
    assert launched(long) == launched(plain) == [p for op, p in instructions if op is L]
    marked, started = set(), set()
    latest = previous = None
    for item in items(long):
        if isinstance(item, Launch):
            assert {ready[phase] for phase in item.phases} <= marked
            started |= set(item.phases)
            latest = item
        elif isinstance(item, Stretch):
            assert set(item.waits) <= started
            if previous is not None:  # it could not have been one with the stretch before
                assert item.items[0].phase in latest.phases
                assert Mark(ready[latest.phases[0]]) in previous.items
            marked |= {x.time for x in item.items if isinstance(x, Mark)}
            previous = item
        elif isinstance(item, Wait):
            assert item.phase in started
        else:
            marked.add(item.time)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(case=cases(topology=Topology(2, 2), solvers=("random", "rows", "zigzag")))
def test_long_stretches_give_the_device_the_same_work_in_the_same_order(case):
    kernel, arrays = ReferenceKernel(), IndexArrays(torch.device("cpu"))
    for part in case.plan.parts:
        for mask in part.masks.values():
            for direction in Direction:
                lowered = lower_program(part, mask, direction, kernel, arrays)
                row_work = set(range(0, len(lowered.instructions), 2))
                check(lowered.instructions, ready_times(lowered), row_work)


def test_own_rows_and_results_travel_around_one_stretch():
    """Two phases of inputs, then one of results: the usual case."""
    instructions = [(L, 0), (L, 1), (C, 0), (W, 0), (C, 1), (W, 1), (C, 2), (L, 2), (W, 2)]
    found = items(long_stretches(instructions, {0: START, 1: START, 2: 6}, {3}))
    assert found == [
        Mark(START),
        Launch((0, 1)),
        Stretch((Compute(0), Wait(0), RowWork(3), Compute(1), Wait(1), Compute(2), Mark(6))),
        Launch((2,)),
        Wait(2),
    ]


def test_a_stretch_ends_before_messages_that_it_makes_ready_itself():
    """Phase 1 passes on what phase 0 brought, and its rank waits for it as well."""
    instructions = [(L, 0), (W, 0), (L, 1), (C, 0), (W, 1), (C, 1)]
    found = items(long_stretches(instructions, {0: START, 1: 1}, {1}))
    assert found == [
        Mark(START),
        Launch((0,)),
        Stretch((Wait(0), RowWork(1), Mark(1), Compute(0))),
        Launch((1,)),
        Stretch((Wait(1), Compute(1))),
    ]


def test_phases_are_launched_in_order_although_a_later_one_is_ready_first():
    instructions = [(L, 0), (W, 0), (L, 1), (L, 2), (W, 2), (C, 0)]
    found = items(long_stretches(instructions, {0: START, 1: 1, 2: START}, set()))
    assert [x for x in found if isinstance(x, Launch)] == [Launch((0,)), Launch((1, 2))]


@pytest.fixture
def in_long_stretches(monkeypatch):
    """As with graphs, but launched: what a GPU does in the first call of a plan."""
    monkeypatch.setattr(Graphs, "choose", lambda *_: Graphs(True))
    monkeypatch.setattr(Graphs, "replays", lambda *_, **__: False)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[*SLOW, HealthCheck.function_scoped_fixture],
)
@given(
    case=cases(dtype="fp32", topology=Topology(2, 2), solvers=("random", "rows"), alignments=(64,)),
    kernel=st.sampled_from([ReferenceKernel(8, 8), RoundingKernel(), CollectingReference()]),
)
@pytest.mark.usefixtures("in_long_stretches")
def test_long_stretches_are_exact_with_relays(case, kernel):
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    assert_equal(run_virtual(case, "default", tensors, kernel=kernel), expected, 1e-5)
