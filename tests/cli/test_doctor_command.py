"""`dyncp doctor`: finds what is wrong, and says so in one sentence."""

import json

import pytest
import torch

from dyncp.calibrate import Finding, World, diagnose, diagnosis
from dyncp.calibrate.calls import RecordedKernel
from dyncp.cli import main
from dyncp.executor import DCPExecutor
from dyncp.kernels import choose
from torchrun import run_under_torchrun

CPU = torch.device("cpu")


def test_a_healthy_node_is_said_to_be_one_with_the_reason_for_its_kernel(capsys, caplog):
    choose._log_once.cache_clear()
    with caplog.at_level("INFO", "dyncp.kernels.choose"):
        assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("All is well.")
    assert "kernel cpu: the device is a CPU" in out
    assert "kernel 'cpu' on cpu: the device is a CPU" in caplog.text


def test_the_reason_of_a_gpu_kernel_says_what_is_missing(monkeypatch):
    missing = {"flash4": "it is not installed; install it", "triton": ""}
    monkeypatch.setattr(choose, "why_not", lambda kernel, _: missing[kernel])
    reason = choose.reason_for("auto", torch.device("cuda"))
    assert "fastest" in reason
    assert "'flash4' is not available: it is not installed; install it" in reason


def test_json_has_what_an_issue_needs_with_a_kernel_that_was_named(capsys):
    assert main(["doctor", "--device", "cpu", "--kernel", "reference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"]
    assert found["kernel"] == {"name": "reference", "reason": "it was requested"}
    assert found["versions"]["torch"] == torch.__version__
    assert found["plan"]["virtual"]
    assert found["plan"]["bytes_moved"] > 0
    assert set(found["plan"]["errors"]) == {"out", "dq", "dk", "dv"}


class Silent(RecordedKernel):
    """Computes nothing."""

    def attend(self, *args, **options) -> None:
        pass


def test_a_kernel_that_computes_nothing_is_found(monkeypatch):
    silent = Silent(DCPExecutor().kernel)
    found = diagnose(World.alone(CPU), silent)
    assert not found.healthy
    [finding] = [finding for finding in found.findings if finding.name == "plan"]
    assert "do not train with it" in finding.sentence


def test_a_plan_that_cannot_run_is_a_finding_and_exit_code_1(capsys):
    assert main(["doctor", "--device", "cpu", "--kernel", "abacus", "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["plan"] is None
    assert "dyncp: plan: a small plan could not run: ValueError: kernel is 'abacus'" in output.err


def test_a_slow_link_is_named():
    matrix = [[None if a == b else 1e9 for b in range(4)] for a in range(4)]
    world = World(0, 4, 4, CPU)
    assert diagnosis.check_bandwidths(matrix, world).passed
    matrix[1][3] = matrix[3][1] = 1e7
    finding = diagnosis.check_bandwidths(matrix, world)
    assert not finding.passed
    assert "ranks 1 and 3" in finding.sentence
    # Between nodes links may be slower than inside.
    for a, b in ((0, 2), (0, 3), (1, 2), (1, 3)):
        matrix[a][b] = matrix[b][a] = 1e7
    assert diagnosis.check_bandwidths(matrix, World(0, 4, 2, CPU)).passed


def test_the_first_rank_with_a_bad_finding_speaks():
    good, bad = Finding("plan", True, "fine"), Finding("plan", False, "broken")
    assert diagnosis.worst_finding([good, good]) == good
    assert diagnosis.worst_finding([good, bad]).sentence == "rank 1: broken"


def test_real_ranks_are_checked_together():
    done = run_under_torchrun(["doctor", "--device", "cpu", "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["healthy"]
    assert found["plan"]["ranks"] == 2
    assert not found["plan"]["virtual"]
    assert found["plan"]["bytes_moved"] > 0
    assert found["groups"]["communicators"] == {"inside": 2}
    assert found["groups"]["operations"] == 2
    assert [one["name"] for one in found["findings"]] == [
        "versions",
        "links",
        "groups",
        "plan",
        "graphs",
    ]
    [[none, rate], _] = found["bytes_per_second"]
    assert none is None
    assert rate > 1e6


@pytest.mark.parametrize("name", ["cuda", "abacus"])
def test_a_device_that_is_not_there_is_a_mistake(capsys, name):
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["doctor", "--device", name]) == 2
    assert f"device is '{name}'" in capsys.readouterr().err
