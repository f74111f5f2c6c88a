"""Several planning processes of one rank: the same batches, each process bounded and replaced."""

import os
import signal
import threading

import pytest
import torch

import planner_faults
from dyncp import PlannerConfig, masks, plan_batch
from dyncp.samples import SampleError
from loaders import make_config, make_loader
from processes import is_gone, wait_until

BATCHES = 8
LARGE = 16_384  # tokens of a batch from which on the other planning processes start
LENGTHS = [planner_faults.UNLUCKY] + [LARGE + 100 * i for i in range(BATCHES)]
IN_ORDER = [[number] for number in range(1, BATCHES + 1)]


class Documents(torch.utils.data.Dataset):
    def __init__(self, broken=None):
        self.broken = broken

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        if index == self.broken:
            raise ZeroDivisionError
        return {"input_ids": torch.full((LENGTHS[index],), index)}


def open_loader(dataset=None, **options):
    options = {"batch_sampler": IN_ORDER, "num_planners": 2} | options
    return make_loader(
        dataset or Documents(),
        masks.sliding_window(window=64),
        virtual_ranks=2,
        planner=PlannerConfig("bisection"),
        **options,
    )


def plans_of(loader):
    return [(int(data["input_ids"].max()), plan.digest) for data, plan in loader]


@pytest.fixture(scope="module")
def expected():
    with open_loader(num_planners=1) as loader:
        plans = plans_of(loader)
        assert len(loader.planning_pids) == 1
    return plans


def test_batches_and_plans_do_not_depend_on_the_number_of_planning_processes(expected):
    with open_loader(num_planners=3) as loader:
        assert plans_of(loader) == expected
        pids = loader.planning_pids
        assert len(set(pids)) == 3
    assert loader.planning_pids == []
    assert all(is_gone(pid) for pid in pids)


def test_without_planning_processes_a_thread_makes_the_same_plans_by_any_function(expected):
    threads = []

    def own(*args, **keywords):
        threads.append(threading.current_thread())
        return plan_batch(*args, **keywords)

    with open_loader(num_planners=0, plan_function=own) as loader:
        assert plans_of(loader) == expected
        assert loader.planning_pids == []
    assert threading.current_thread() not in threads
    assert {thread.name for thread in threads} == {"dyncp-plan"}


def test_without_planning_processes_what_the_planner_raises_is_the_reason_for_a_static_plan(caplog):
    unlucky = {"batch_sampler": [[1], [0, 2], [3]], "plan_function": planner_faults.raising}
    with open_loader(num_planners=0, **unlucky) as loader:
        solvers = [plan.parts[0].solver for _, plan in loader]
    assert solvers == ["bisection", "zigzag", "bisection"]
    assert "gets a static plan: the planner raised ArithmeticError: an unlucky" in caplog.text


def test_resuming_is_exact_with_several_planning_processes(expected):
    with open_loader(num_planners=0) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
    with open_loader() as resumed:
        resumed.load_state_dict(state)
        assert plans_of(resumed) == expected[3:]


def test_small_batches_start_one_planning_process():
    options = {"batch_sampler": [[0]] * BATCHES, "num_planners": 3}
    with open_loader(**options) as loader:
        assert len(list(loader)) == BATCHES
        assert len(loader.planning_pids) == 1


def test_every_planning_process_is_replaced_when_it_is_killed(expected):
    with open_loader(look_ahead=2) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        killed = loader.planning_pids
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        found += list(iterator)
        assert plans_of(found) == expected
        assert loader.metrics.restarts >= 1
        assert loader.metrics.static_plans == 0
        assert not set(killed) & set(loader.planning_pids)


def test_a_plan_that_hangs_is_given_up_while_the_other_process_goes_on(expected):
    order = [*IN_ORDER[:2], [0, 3], *IN_ORDER[3:]]
    options = {"plan_function": planner_faults.endless, "plan_timeout": 3}
    with open_loader(batch_sampler=order, **options) as loader:
        found = plans_of(loader)
    assert loader.metrics.static_plans >= 1
    assert [number for number, _ in found] == [number for number, _ in expected]
    assert loader.metrics.restarts >= 1


def test_an_error_comes_after_all_batches_before_it():
    with open_loader(Documents(broken=5), lengths=None) as loader:
        iterator = iter(loader)
        assert [int(next(iterator)[0]["input_ids"].max()) for _ in range(4)] == [1, 2, 3, 4]
        with pytest.raises(SampleError, match="reading of sample 5"):
            next(iterator)


def test_closing_ends_plans_in_the_making_in_all_processes():
    before = set(threading.enumerate())
    unlucky = [[0, number] for number in range(1, BATCHES + 1)]
    loader = open_loader(batch_sampler=unlucky, plan_function=planner_faults.endless)
    iter(loader)
    assert wait_until(lambda: len(loader.planning_pids) == 2)
    pids = loader.planning_pids
    loader.close()
    assert set(threading.enumerate()) == before
    assert all(is_gone(pid) for pid in pids)


class Late(Documents):
    """Can be read only while a planning process runs."""

    loader = None

    def __getitem__(self, index):
        assert wait_until(lambda: self.loader is None or self.loader.planning_pids)
        return super().__getitem__(index)


def test_the_planning_process_starts_before_the_first_sample_is_read():
    dataset = Late()
    with open_loader(dataset) as dataset.loader:
        next(iter(dataset.loader))
    dataset.loader = None


@pytest.mark.parametrize(
    ("cores", "local", "members", "options", "processes"),
    [
        (16, None, 1, {}, 4),
        (2, None, 1, {}, 2),
        (16, "8", 1, {}, 2),
        (4, "8", 1, {}, 1),
        (16, None, 2, {}, 2),
        (16, None, 32, {}, 1),
        (16, None, 32, {"look_ahead": 64}, 2),
        (16, None, 1, {"look_ahead": 0}, 1),
        (1, None, 32, {"num_planners": 3}, 3),
    ],
)
def test_processes_are_as_many_as_there_are_cores_and_batches_to_plan_ahead(
    monkeypatch, cores, local, members, options, processes
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert make_config(**options).planning_processes(members) == processes
