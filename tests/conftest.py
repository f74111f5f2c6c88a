"""Settings for all tests."""

import importlib
import os
import signal

# Test tensors are tiny: a second thread only adds waiting, and bits depend on the thread count.
# Read when torch is imported, by processes that tests start, and by Accelerate.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

import sizes
from dyncp import Batch, PlannerConfig, Topology, masks, plan_batch
from dyncp.compiled import is_compiled
from dyncp.dataloader import LoaderConfig
from dyncp.placement.split import split_tree
from dyncp.plan import Direction
from processes import planning_threads

# Tests that a shell runs in the background ignore SIGINT, and so does what they start, unless there
# is a handler here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton's interpreter runs the kernels; triton reads this when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The name dyncp.executor.attention is the function; this is the module behind it.
attention_module = importlib.import_module("dyncp.executor.attention")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="tests at full size: `make test-all`")


def pytest_configure(config):
    """Compiles before workers start: side by side they would all do it, and numba's caches of
    functions with several signatures are not made for two writers."""
    sizes.choose(config.getoption("full"))
    has_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if has_workers and not is_compiled(split_tree):
        batch = Batch.of([masks.causal(900), masks.lambda_shaped(500), masks.causal(60)])
        plan_batch(batch, Topology(2, 2), planner=PlannerConfig(effort="quality"))


def pytest_collection_modifyitems(config, items):
    """Leaves out what only a full run tries."""
    if not config.getoption("full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture
def plans_here(monkeypatch):
    """Loaders of this process plan in threads."""
    monkeypatch.setattr(LoaderConfig, "planning_processes", planning_threads)


@pytest.fixture(autouse=True)
def bytes_moved_equal_the_plans(monkeypatch):
    """Every attention call of every test moves the bytes that its plan declares."""
    for name, direction in (
        ("attend_forward", Direction.FORWARD),
        ("attend_backward", Direction.BACKWARD),
    ):
        original = getattr(attention_module, name)

        def checked(prepared, mask, scale, *tensors, original=original, direction=direction):
            given = tensors[0]
            q, k = given[:2] if isinstance(given, tuple) else tensors[:2]
            transport, shape = prepared.engine.transport, prepared.shape_of(q, k)
            before = transport.bytes_sent
            result = original(prepared, mask, scale, *tensors)
            declared = sum(part.sent_bytes(mask, direction, shape) for part in prepared.parts)
            assert transport.bytes_sent - before == declared
            return result

        monkeypatch.setattr(attention_module, name, checked)
