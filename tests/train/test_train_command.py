"""`dyncp train` on real processes, and its parts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from dyncp.cli.train_report import conclusion, format_row, largest_difference, summarise
from dyncp.train.config import SIZES, TrainConfig
from dyncp.train.loop import (
    StepResult,
    open_corpus,
    ring_bytes,
    train_in_one_process,
    train_on_ranks,
)

pytestmark = pytest.mark.xdist_group("processes")

SHORT = ("train", "--steps", "3", "--max-length", "512")
RESULT = StepResult(1, 1000, 3, 700, 4.5, 2_000_000, 8_000_000, 1.1, 1.2, 0.5)


@pytest.fixture(scope="module")
def zigzag_run():
    words = ("--ranks", "2", "--solver", "zigzag", "--json")
    return subprocess.run(
        [sys.executable, "-m", "dyncp", *SHORT, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_two_processes_have_the_losses_of_one(zigzag_run):
    text = zigzag_run.stderr
    assert zigzag_run.returncode == 0, text
    assert "Losses agree: 2 ranks and one process" in text
    assert "Next:" in text
    assert len([line for line in text.splitlines() if re.match(r"    \d ", line)]) == 3
    assert max(map(len, text.splitlines())) <= 100


def test_json_has_the_losses_and_bytes_of_every_step(zigzag_run):
    summary = json.loads(zigzag_run.stdout)
    assert summary["agrees"]
    assert summary["largest_difference"] <= summary["tolerance"]
    assert summary["solver"] == "zigzag"
    assert len(summary["losses"]) == len(summary["reference_losses"]) == len(summary["steps"]) == 3
    assert summary["losses"][-1] < summary["losses"][0]
    for step in summary["steps"]:
        # On 2 ranks zigzag moves each rank's KV to the other, less what causality spares.
        assert 0.7 * step["ring_bytes"] < step["moved_bytes"] <= step["ring_bytes"]
        assert step["ring_bytes"] == 3 * step["tokens"] * SIZES["tiny"].kv_values * 4
        assert step["seconds"] > 0
        assert step["token_imbalance"] >= 1


def test_torchrun_can_start_it():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*torchrun, "-m", "dyncp", *SHORT], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Losses were not compared" in run.stdout


def test_interrupting_leaves_no_process_behind():
    words = ("train", "--no-reference", "--ranks", "2", "--steps", "100000", "--max-length", "64")
    command = subprocess.Popen(
        [sys.executable, "-m", "dyncp", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert command.stdout is not None
    for line in command.stdout:
        if line.split()[0] == "2":  # step 2: the ranks are at work
            break
    ranks = descendants(command.pid)
    assert len(ranks) >= 3  # torchrun and two ranks
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "dyncp: interrupted" in errors
    assert "Traceback" not in errors
    time.sleep(0.2)
    assert not [pid for pid in ranks if is_running(pid)]


def descendants(pid):
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parent = dict(map(int, line.split()) for line in listed.stdout.splitlines())
    found = {pid}
    while more := {child for child, of in parent.items() if of in found} - found:
        found |= more
    return found - {pid}


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_virtual_ranks_have_the_losses_of_one_process(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox " * (number + 1) ** 2)
    config = TrainConfig(corpus=str(tmp_path), max_length=300, steps=5, mask="prefix_lm:prefix=4")
    corpus = open_corpus(config)
    reference = list(train_in_one_process(config, corpus))
    results = list(train_on_ranks(replace(config, solver="random"), corpus, virtual_ranks=3))
    assert [r.tokens for r in results] == [r.tokens for r in reference]
    difference = largest_difference([r.loss for r in results], [r.loss for r in reference])
    assert difference < 1e-5
    assert all(r.moved_bytes > 0 for r in results)
    assert not any(r.moved_bytes for r in reference)


def test_ring_attention_moves_kv_forward_and_kv_with_gradients_backward():
    kv = 100 * 2 * 2 * 32 * 4  # tokens × (k, v) × heads × dim × bytes
    assert ring_bytes(TrainConfig(model="tiny"), 100, 4) == SIZES["tiny"].layers * 3 * (kv + 2 * kv)


def test_a_row_fits_into_its_columns():
    assert format_row(RESULT, 4.5001).split() == [
        *("1", "1,000", "3", "700", "4.5000", "4.5001", "1.0e-04"),
        *("2.0", "8.0", "75.0", "%", "0.5"),
    ]


@pytest.mark.parametrize(
    ("reference", "agrees"), [(4.50001, True), (4.6, False), (float("nan"), False)]
)
def test_losses_agree_within_the_tolerance(reference, agrees):
    summary = summarise(TrainConfig(), 4, [RESULT], [reference])
    assert summary["agrees"] is agrees
    assert conclusion(summary)[0].startswith("Losses agree" if agrees else "LOSSES DIFFER")


def test_a_disagreement_is_an_error(monkeypatch, capsys):
    from dyncp.cli import main, train

    monkeypatch.setattr(train, "run_reference", lambda _: [9.0])
    monkeypatch.setattr(train, "run_virtual", lambda *_, **__: [RESULT])
    assert main(["train", "--virtual-ranks", "2", "--steps", "1"]) == 1
    assert "dyncp: error: LOSSES DIFFER: 2 ranks" in capsys.readouterr().err
