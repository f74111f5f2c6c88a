"""The planning process: has a timeout, is replaced when it dies, and ends with its loader."""

import logging
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dyncp
import planner_faults
from dyncp import (
    AttentionShape,
    Batch,
    DCPDataLoader,
    LoaderTuning,
    PlannerConfig,
    Topology,
    masks,
    plan_batch,
)
from dyncp.dataloader import patience
from dyncp.plan import decode_part
from dyncp.planner.process import PlanFailed, PlanProcess
from dyncp.samples import SampleError
from processes import is_gone, stop, wait_until
from sizes import full

BATCH = Batch.of([masks.causal(40), masks.sliding_window(9, window=2)])
UNLUCKY = Batch.of([masks.causal(planner_faults.UNLUCKY)])
ARGS = (Topology(1, 2), AttentionShape(4, 2, 8), PlannerConfig())


@pytest.fixture
def process():
    process = PlanProcess(timeout=60)
    yield process
    process.close()


def ask(process, batch=BATCH, function=plan_batch):
    return process.plan(partial(function, batch, *ARGS))


def test_it_gives_the_plan_that_the_planner_gives_here_and_imports_no_torch(process):
    reply = ask(process)
    expected = plan_batch(BATCH, *ARGS)
    parts = [decode_part(part) for part in reply.parts]
    assert {part.digest for part in parts} == {expected.digest}
    assert {part.fingerprint for part in parts} == {BATCH.fingerprint}
    assert [part.rank for part in parts] == [0, 1]
    assert reply.most_tokens == expected.parts[0].tokens_per_rank.max()
    libraries = Path(f"/proc/{process.pid}/maps")
    if libraries.exists():
        assert "torch" not in libraries.read_text()


def test_a_killed_process_is_replaced_and_the_batch_planned_again(process):
    first = ask(process)
    pid = process.pid
    stop(pid)  # it cannot answer before it is killed
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    assert ask(process).parts == first.parts
    assert process.pid != pid
    assert process.restarts == 1


def test_failures_of_the_planner_have_a_reason(process):
    with pytest.raises(PlanFailed, match="the planner raised ArithmeticError: an unlucky batch"):
        ask(process, UNLUCKY, planner_faults.raising)
    pid = process.pid
    assert ask(process).parts  # the same process goes on
    assert process.pid == pid
    with pytest.raises(PlanFailed, match="the planning process died 3 times"):
        ask(process, UNLUCKY, planner_faults.dying)
    process.timeout = 0.3
    with pytest.raises(PlanFailed, match=r"the planner did not answer within 0\.3 s"):
        ask(process, UNLUCKY, planner_faults.endless)
    assert process.pid is None


def test_a_request_that_cannot_be_read_costs_no_process(process, monkeypatch):
    ask(process)
    pid = process.pid
    missing = ModuleType("a_module_that_is_not_there")
    monkeypatch.setitem(sys.modules, missing.__name__, missing)
    exec("def plan(): pass", missing.__dict__)
    with pytest.raises(PlanFailed, match=r"raised ModuleNotFoundError: .*\(reading the request\)"):
        ask(process, function=missing.plan)
    assert process.pid == pid
    assert process.restarts == 0


def test_it_ends_when_its_parent_is_killed():
    code = """
from dyncp.planner.process import PlanProcess
from dyncp import AttentionShape, Batch, PlannerConfig, Topology, masks, plan_batch
from functools import partial
process = PlanProcess(60)
batch = Batch.of([masks.causal(4)])
process.plan(partial(plan_batch, batch, Topology(), AttentionShape(), PlannerConfig()))
print(process.pid, flush=True)
input()
"""
    root = Path(dyncp.__file__).parents[1]
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert wait_until(lambda: is_gone(pid))


SAMPLES = [{"input_ids": [i] * n} for i, n in enumerate((5, 9, 13, 12, 1, 7))]


def test_failed_plans_are_replaced_by_static_ones_with_one_warning_each(caplog, monkeypatch):
    monkeypatch.setattr(patience, "WARNED", 300)  # a slow machine is no reason for a warning here
    with (
        caplog.at_level(logging.WARNING),
        DCPDataLoader(
            SAMPLES,
            masks.causal,
            virtual_ranks=2,
            tokens_per_batch=14,
            planner=PlannerConfig("bisection"),
            tuning=LoaderTuning(plan_function=planner_faults.raising),
        ) as loader,
    ):
        solvers = [plan.parts[0].solver for _, plan in loader]
    assert solvers == ["bisection", "zigzag", "bisection", "bisection"]
    assert loader.metrics.static_plans == 1
    (warning,) = caplog.records
    assert warning.getMessage().startswith(
        "batch 1 of epoch 0 gets a static plan: the planner raised ArithmeticError: an unlucky"
    )


def test_a_planner_that_cannot_plan_at_all_leaves_static_plans():
    wrong = PlannerConfig(head_groups=2)  # the model's heads are not known
    with DCPDataLoader(SAMPLES, masks.causal, virtual_ranks=2, planner=wrong) as loader:
        ((_, plan),) = loader
    assert plan.parts[0].solver == "zigzag"


def test_a_planner_that_hangs_is_given_up_after_its_bound():
    with DCPDataLoader(
        SAMPLES,
        masks.causal,
        virtual_ranks=2,
        tokens_per_batch=14,
        planner=PlannerConfig("bisection"),
        # The process may need the time to start, too, on a busy machine.
        tuning=LoaderTuning(plan_timeout=3, plan_function=planner_faults.endless),
    ) as loader:
        batches = [(data["input_ids"].shape[1], plan.parts[0].solver) for data, plan in loader]
    assert [tokens for tokens, _ in batches] == [14, 14, 12, 7]
    assert batches[1][1] == "zigzag"
    assert loader.metrics.static_plans >= 1
    assert loader.metrics.restarts >= 1


def test_breaking_off_and_closing_leave_no_thread_and_no_process():
    before = set(threading.enumerate())
    loader = DCPDataLoader(SAMPLES, masks.causal, tokens_per_batch=14)
    for data, _ in loader:
        assert data["input_ids"].shape == (1, 14)
        break
    assert set(threading.enumerate()) == before
    (pid,) = loader.planning_pids
    assert not is_gone(pid)  # for the next iteration
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(RuntimeError, match="iteration of the loader was closed"):
        list(iterator)
    assert set(threading.enumerate()) == before
    assert is_gone(pid)
    assert len(list(loader)) == 4  # it may be used again
    (pid,) = loader.planning_pids
    del loader, iterator
    assert wait_until(lambda: is_gone(pid))


MAIN_SCRIPT = """
from dyncp import DCPDataLoader, LoaderTuning, masks, plan_batch
def own(*args, **keywords):
    return plan_batch(*args, **keywords)
for function in (own, lambda *args: None):
    try:
        tuning = LoaderTuning(plan_function=function)
    except ValueError as error:
        print(error)
"""


def run_script(folder, text):
    (folder / "script.py").write_text(text)
    root = Path(dyncp.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )


def test_a_plan_function_that_the_planning_process_cannot_get_is_refused(tmp_path):
    first, second = run_script(tmp_path, MAIN_SCRIPT).stdout.splitlines()
    assert "of the main script, which the planning process does not run; move it to a mod" in first
    assert "which cannot be sent to the planning process" in second


EXITS = """
import sys, threading, time, torch
from dyncp import DCPDataLoader, masks
from dyncp.dataloader import patience
class Slow:
    def __len__(self):
        return 300
    def __getitem__(self, index):
        time.sleep(0.02)
        return {"input_ids": [1] * 40}
patience.WARNED = 300  # a slow machine is no reason for a warning here
loader = DCPDataLoader(Slow(), masks.causal, tokens_per_batch=80)
iterator, taken = iter(loader), threading.Event()
def train():
    for _ in loader:
        taken.set()
"""


@pytest.mark.parametrize(
    "end",
    [
        full(""),
        full("next(iterator)"),
        full("sys.loader, sys.iterator = loader, iterator; next(iterator)"),
        "loader.cycle = loader, iterator; next(iterator); del loader, iterator",
        full("threading.Thread(target=lambda: (time.sleep(0.5), next(iterator))).start()"),
        "threading.Thread(target=train, daemon=True).start(); taken.wait()",
    ],
)
def test_the_end_of_the_interpreter_is_quiet(tmp_path, end):
    assert run_script(tmp_path, EXITS + end).stderr == ""


SCRIPT = """
import time, torch
from dyncp import DCPDataLoader, masks
samples = [{"input_ids": [1] * 40}] * 500
for data, plan in (loader := DCPDataLoader(samples, masks.causal, tokens_per_batch=80)):
    print(loader.planning_pids[0], flush=True)
    time.sleep(0.2)
"""


def test_a_script_without_main_guard_works_and_ctrl_c_leaves_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(dyncp.__file__).parents[1]
    run = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        start_new_session=True,
    )
    pid = int(run.stdout.readline())
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    _, errors = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1  # the script's own
    assert "KeyboardInterrupt" in errors
    assert wait_until(lambda: is_gone(pid))


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, index):
        return SAMPLES[index] if index != 3 else 1 / 0


ON_DEMAND = LoaderTuning(look_ahead=0)


def test_errors_of_dataset_and_mask_function_reach_the_loop_with_the_samples_index():
    with DCPDataLoader(Broken(), masks.causal, tokens_per_batch=14, tuning=ON_DEMAND) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(SampleError, match="reading of sample 3 raised ZeroDiv") as caught:
            next(iterator)  # batch 1 is complete only when sample 3 does not fit
    assert caught.value.index == 3
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def mask_fn(sample):
        return masks.causal(sample) if sample["input_ids"][0] != 4 else {}["mask"]

    with (
        DCPDataLoader(SAMPLES, mask_fn, tokens_per_batch=14) as loader,
        pytest.raises(SampleError, match="the mask of sample 4 raised KeyError: 'mask'"),
    ):
        list(loader)
