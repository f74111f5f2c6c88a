"""Graphs: when they are used, and when segments are captured. tests/gpu runs real graphs."""

from types import SimpleNamespace

import pytest
import torch

from dyncp import DCPExecutor
from dyncp.executor.graphs import MOST_SCALES, Frame, Graphs, Segment
from dyncp.kernels import ReferenceKernel
from dyncp.kernels.row_ops import Results

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def test_cpus_have_none_and_say_so_where_they_are_asked_for():
    assert not DCPExecutor().engine.graphs.wanted
    assert not DCPExecutor(graphs=False).engine.graphs.wanted
    with pytest.raises(
        ValueError, match="graphs=True, but graphs need a CUDA GPU, and the device is cpu"
    ):
        DCPExecutor(graphs=True)


def test_other_choices_are_refused():
    with pytest.raises(
        ValueError, match="graphs is 'yes'; choose one of 'auto', 'serial', True, False"
    ):
        DCPExecutor(graphs="yes")


def test_gpus_have_them_unless_they_are_switched_off(caplog):
    kernel = SimpleNamespace(name="some", capturable=True)
    assert Graphs.choose("auto", GPU, kernel).wanted
    assert Graphs.choose(True, GPU, kernel).wanted
    assert Graphs.choose("auto", GPU, kernel).parallel
    assert Graphs.choose("serial", GPU, kernel) == Graphs(True, parallel=False)
    with caplog.at_level("INFO", "dyncp.executor.graphs"):
        assert not Graphs.choose(False, GPU, kernel).wanted
    assert "not replayed as CUDA graphs: graphs=False was requested" in caplog.text


def test_kernels_that_cannot_be_captured_are_launched(caplog):
    kernel = ReferenceKernel()
    with caplog.at_level("INFO", "dyncp.executor.graphs"):
        assert not Graphs.choose("auto", GPU, kernel).wanted
    assert "calls of kernel 'reference' cannot be captured" in caplog.text
    with pytest.raises(ValueError, match="graphs=True, but calls of kernel 'reference'"):
        Graphs.choose(True, GPU, kernel)


def test_anomaly_mode_launches_kernel_by_kernel_and_says_why(caplog):
    with (
        caplog.at_level("INFO", "dyncp.executor.graphs"),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        assert not Graphs(True).replays(captured=False)
    assert "autograd's anomaly mode is on" in caplog.text


class Graph:
    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch):
    """The captured graphs, by scale."""
    made = {}
    monkeypatch.setattr(Segment, "_capture", lambda _, frame: made.setdefault(frame.scale, Graph()))
    return made


def frame(scale=1.0, replays=True):
    return Frame((), None, None, Results(()), scale, replays)


def test_a_segment_is_launched_then_captured_then_replayed(graphs):
    launched = []
    segment = Segment([launched.append, launched.append], fixed=True)
    for _ in range(4):
        segment.run(frame())
    assert len(launched) == 2
    assert graphs[1.0].replays == 3


def test_every_scale_has_its_own_graph_and_only_a_few_have_one(graphs):
    launched = []
    segment = Segment([launched.append], fixed=True)
    for scale in range(MOST_SCALES + 2):
        for _ in range(3):
            segment.run(frame(float(scale)))
    assert sorted(graphs) == [float(scale) for scale in range(MOST_SCALES)]
    assert len(launched) == MOST_SCALES + 2 * 3


def test_work_that_needs_the_callers_tensors_is_always_launched(graphs):
    launched = []
    for segment, given in (
        (Segment([launched.append], fixed=False), frame()),
        (Segment([launched.append], fixed=True), frame(replays=False)),
    ):
        for _ in range(3):
            segment.run(given)
    assert len(launched) == 6
    assert not graphs


def test_a_segment_that_cannot_be_captured_is_launched_from_then_on(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no room for a graph")

    monkeypatch.setattr(Segment, "_capture", fail)
    launched = []
    segment = Segment([launched.append], fixed=True)
    for _ in range(4):
        segment.run(frame())
    assert len(launched) == 4
    assert caplog.text.count("could not be captured as a CUDA graph: no room for a graph") == 1
