"""The order of work with graphs: few segments, and nothing starts before what it depends on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Tensors, assert_equal, cases, largest_terms, run_dense, run_virtual
from dyncp import Topology
from dyncp.executor.graphs import Graphs, Segment
from dyncp.executor.kernel_calls import RankProgram
from dyncp.executor.order import (
    START,
    Compute,
    DeviceWork,
    GraphStream,
    Launch,
    LaunchKind,
    Mark,
    RowWork,
    Wait,
    assign_streams,
    graph_order,
    program_order,
    ready_times,
)
from dyncp.kernels import ReferenceKernel
from dyncp.plan import Direction, Op
from kernel_styles import CollectingReference, RoundingKernel
from sizes import draws

L, W, C = Op.LAUNCH, Op.WAIT, Op.COMPUTE


def device_work(order):
    """Everything except launches of messages."""
    found = []
    for item in order:
        if isinstance(item, DeviceWork):
            found += item.items
        elif not isinstance(item, Launch):
            found.append(item)
    return found


def launched(order):
    return [phase for item in order if isinstance(item, Launch) for phase in item.phases]


def check(instructions, ready, row_work):
    plain, long = (f(instructions, ready, row_work) for f in (program_order, graph_order))
    assert device_work(long) == device_work(plain)
    assert launched(long) == launched(plain) == [p for op, p in instructions if op is L]
    marked, started = set(), set()
    latest = previous = None
    for item in long:
        if isinstance(item, Launch):
            assert {ready[phase] for phase in item.phases} <= marked
            started |= set(item.phases)
            latest = item
        elif isinstance(item, DeviceWork):
            assert set(item.waits) <= started
            if previous is not None:  # it could not have been part of the previous segment
                assert item.items[0].phase in latest.phases
                assert Mark(ready[latest.phases[0]]) in previous.items
            marked |= {x.time for x in item.items if isinstance(x, Mark)}
            previous = item
        elif isinstance(item, Wait):
            assert item.phase in started
        else:
            marked.add(item.time)


@draws(60)
@given(case=cases(topology=Topology(2, 2), solvers=("random", "owner_computes", "zigzag")))
def test_few_segments_give_the_device_the_same_work_in_the_same_order(case):
    for part in case.plan.parts:
        for mask in part.masks.values():
            for direction in Direction:
                program = RankProgram(part, mask, direction)
                row_work = set(range(0, len(program.instructions), 2))
                check(program.instructions, ready_times(program), row_work)


def test_own_rows_and_results_travel_around_one_segment():
    """Two phases of inputs, then one of results: the usual case."""
    instructions = [(L, 0), (L, 1), (C, 0), (W, 0), (C, 1), (W, 1), (C, 2), (L, 2), (W, 2)]
    found = graph_order(instructions, {0: START, 1: START, 2: 6}, {3})
    assert found == [
        Mark(START),
        Launch((0, 1)),
        DeviceWork(
            (Compute(0, 2), Wait(0), RowWork(3), Compute(1, 4), Wait(1), Compute(2, 6), Mark(6))
        ),
        Launch((2,)),
        Wait(2),
    ]


def test_a_segment_ends_before_messages_that_it_makes_ready_itself():
    """Phase 1 relays blocks of phase 0, and the rank also waits for phase 1."""
    instructions = [(L, 0), (W, 0), (L, 1), (C, 0), (W, 1), (C, 1)]
    found = graph_order(instructions, {0: START, 1: 1}, {1})
    assert found == [
        Mark(START),
        Launch((0,)),
        DeviceWork((Wait(0), RowWork(1), Mark(1), Compute(0, 3))),
        Launch((1,)),
        DeviceWork((Wait(1), Compute(1, 5))),
    ]


def test_phases_are_launched_in_order_although_a_later_one_is_ready_first():
    instructions = [(L, 0), (W, 0), (L, 1), (L, 2), (W, 2), (C, 0)]
    found = graph_order(instructions, {0: START, 1: 1, 2: START}, set())
    assert [x for x in found if isinstance(x, Launch)] == [Launch((0,)), Launch((1, 2))]


@pytest.fixture
def in_graph_order(monkeypatch):
    """The order of graphs, but launched, as in the first call of a plan on a GPU."""
    monkeypatch.setattr(Graphs, "choose", lambda *_: Graphs(True))
    monkeypatch.setattr(Graphs, "replays", lambda *_, **__: False)


@draws(60)
@given(
    case=cases(
        dtype="fp32",
        topology=Topology(2, 2),
        solvers=("random", "owner_computes"),
        alignments=(64,),
    ),
    kernel=st.sampled_from([ReferenceKernel(8), RoundingKernel(), CollectingReference()]),
)
@pytest.mark.usefixtures("in_graph_order")
def test_few_segments_are_exact_with_relays(case, kernel):
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    terms = largest_terms(case, "default", tensors)
    assert_equal(run_virtual(case, "default", tensors, kernel=kernel), expected, 1e-5, terms)


def in_order_of_streams(segment, frame, choose):
    """Runs launches in an order that the streams allow; `choose` picks one of the next ones."""
    left = list(range(len(segment._work)))
    streams = segment._streams or [(0, ())] * len(segment._work)
    while left:
        first = {}
        for stream, _ in streams:
            waiting = [i for i in left if streams[i][0] == stream]
            first |= {stream: waiting[0]} if waiting else {}
        ready = [i for i in first.values() if not set(streams[i][1]) & set(left)]
        number = choose(ready)
        segment._work[number](frame)
        left.remove(number)


@pytest.mark.parametrize(
    "choose",
    [max, lambda ready: ready[0], lambda ready: ready[-1]],
    ids=["latest", "kernels first", "sums first"],
)
@draws(40)
@given(
    case=cases(
        dtype="fp32",
        topology=Topology(2, 2),
        solvers=("random", "owner_computes"),
        alignments=(128,),
    ),
    kernel=st.sampled_from([ReferenceKernel(8), RoundingKernel(), CollectingReference()]),
)
@pytest.mark.usefixtures("in_graph_order")
def test_work_on_parallel_streams_may_run_in_any_order(case, kernel, choose, monkeypatch):
    monkeypatch.setattr(
        Segment, "_launch", lambda self, frame: in_order_of_streams(self, frame, choose)
    )
    tensors = Tensors.draw(case)
    expected = run_dense(case, "default", tensors, torch.float64)
    terms = largest_terms(case, "default", tensors)
    assert_equal(run_virtual(case, "default", tensors, kernel=kernel), expected, 1e-5, terms)


def test_kernel_calls_alternate_between_two_streams_and_copies_wait_for_their_slots():
    launches = [
        (LaunchKind.KERNEL, 0), (LaunchKind.WAIT, START), (LaunchKind.COPY, 1),
        (LaunchKind.KERNEL, 2), (LaunchKind.WAIT, START), (LaunchKind.COPY, 3),
        (LaunchKind.KERNEL, 4), (LaunchKind.SUM, 4), (LaunchKind.MARK, 4),
    ]  # fmt: skip
    found = assign_streams(launches, {3: 0}, calls_depend=False)
    assert found == [
        (GraphStream.KERNELS, []),
        (GraphStream.COPIES, []),
        (GraphStream.COPIES, []),
        (GraphStream.OTHER_KERNELS, [2]),
        (GraphStream.COPIES, []),
        (GraphStream.COPIES, [0]),  # fills slots that were last used at time 0
        (GraphStream.KERNELS, [5]),
        (GraphStream.SUMS, [6, 3, 5]),
        (GraphStream.SUMS, [5]),
    ]
    assert {stream for stream, _ in assign_streams(launches, {3: 0}, calls_depend=True)} == {
        GraphStream.KERNELS, GraphStream.COPIES, GraphStream.SUMS
    }  # fmt: skip
