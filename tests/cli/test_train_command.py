"""`dyncp train` on real processes and on virtual ranks."""

import io
import json
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from dyncp.cli import build_parser, main
from processes import is_gone, wait_until
from sizes import full, pick
from torchrun import run_under_torchrun

train = pytest.importorskip("examples.train", reason="the extra transformers is missing")


SHORT = ("train", "--steps", "3", "--max-length", "512")
ROW = {
    "step": 1, "tokens": 1000, "documents": 3, "longest": 700, "loss": 4.5, "seconds": 0.5,
    "moved_bytes": 2_000_000, "ring_bytes": 8_000_000, "compute_imbalance": 1.1,
    "stall_seconds": 0.0,
}  # fmt: skip


def parsed(*words):
    return build_parser().parse_args(["train", *words])


ZIGZAG = (*SHORT, "--ranks", "2", "--solver", "zigzag", "--json")


@pytest.fixture(scope="module")
def zigzag_run():
    """The command; in a small run, its ranks are not started by torchrun."""
    if pick(False, True):
        command = [sys.executable, "-m", "dyncp", *ZIGZAG]
        return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    out, err = io.StringIO(), io.StringIO()

    def launch(words, num_ranks):
        done = run_under_torchrun(words[2:], num_ranks)
        out.write(done.stdout)
        err.write(done.stderr)
        return done.returncode

    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(train, "launch", launch):
        code = main(ZIGZAG)
    return subprocess.CompletedProcess(ZIGZAG, code, out.getvalue(), err.getvalue())


def test_two_processes_have_the_losses_of_one(zigzag_run):
    text = zigzag_run.stderr
    assert zigzag_run.returncode == 0, text
    assert "Losses agree: 2 ranks and one process" in text
    assert "Next:" in text
    rows = [line for line in text.splitlines() if re.match(r"    \d ", line)]
    assert len(rows) == 3
    assert max(map(len, [train.HEADER, *rows])) <= 100


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
        assert step["ring_bytes"] == 3 * step["tokens"] * train.KV_VALUES * 4
        assert step["seconds"] > 0
        assert step["compute_imbalance"] >= 1


def test_torchrun_can_start_it():
    run = run_under_torchrun([*SHORT], timeout=250)
    assert run.returncode == 0, run.stderr
    assert "Losses were not compared" in run.stdout


LAUNCH = "import sys; from examples.launch import launch; launch(sys.argv[1:], 2)"
WORK = "import os, time; os.write(1, b'at work\\n'); time.sleep(600)"


def test_interrupting_a_launch_leaves_no_process_behind(tmp_path):
    (tmp_path / "work.py").write_text(WORK)
    launched = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tmp_path / "work.py")],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert [launched.stdout.readline() for _ in range(2)] == ["at work\n"] * 2
    ranks = descendants(launched.pid)
    assert len(ranks) >= 3  # torchrun and two ranks
    launched.send_signal(signal.SIGINT)
    _, errors = launched.communicate(timeout=120)
    assert launched.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1  # its own
    assert wait_until(lambda: all(is_gone(pid) for pid in ranks))


def test_an_interrupted_command_says_so_in_one_line(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err.strip() == "dyncp: interrupted"


@pytest.mark.full
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
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 130
    assert "dyncp: interrupted" in errors
    assert "Traceback" not in errors
    assert wait_until(lambda: all(is_gone(pid) for pid in ranks))


def descendants(pid):
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parent = dict(map(int, line.split()) for line in listed.stdout.splitlines())
    found = {pid}
    while more := {child for child, of in parent.items() if of in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.parametrize(
    "mask", [full("prefix_lm:prefix=4"), "shared_question:answers=2", full("causal")]
)
def test_virtual_ranks_have_the_losses_of_one_process(tmp_path, mask):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox " * (number + 1) ** 2)
    words = ["--corpus", str(tmp_path), "--max-length", "300", "--steps", "4", "--mask", mask]
    args = parsed(*words, "--solver", "random")
    reference, rows = list(train.train_plain(args)), list(train.train_on_ranks(args, 3))
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in reference]
    losses, alone = ([row["loss"] for row in found] for found in (rows, reference))
    assert losses == pytest.approx(alone, abs=1e-5)
    assert losses[-1] < losses[0] - 0.1
    assert all(row["moved_bytes"] > 0 for row in rows)
    assert not any(row["moved_bytes"] for row in reference)


def test_ring_attention_moves_kv_forward_and_kv_with_gradients_backward():
    kv = 2 * 100 * 2 * 2 * 16 * 4  # layers × tokens × (k, v) × heads × dim × bytes
    assert train.ring_bytes(100, 4) == 3 * (kv + 2 * kv)
    assert train.ring_bytes(100, 4, recomputed=True) == 3 * (2 * kv + 2 * kv)


def test_a_row_fits_into_its_columns(capsys):
    train.compare(parsed(), 4, [ROW], [4.5001])
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("1", "1,000", "3", "700", "4.5000", "4.5001", "1.0e-04", "2.0", "8.0", "1.10", "0.5")
    ]


@pytest.mark.parametrize(
    ("reference", "agrees"), [(4.50001, True), (4.6, False), (float("nan"), False)]
)
def test_a_disagreement_is_an_error(capsys, reference, agrees):
    assert train.compare(parsed(), 4, [ROW], [reference]) == (0 if agrees else 1)
    captured = capsys.readouterr()
    assert ("Losses agree: 4 ranks" in captured.out) is agrees
    assert ("dyncp: error: LOSSES DIFFER: 4 ranks" in captured.err) is not agrees


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for module in ("train", "train_llama"):
        monkeypatch.delitem(sys.modules, f"examples.{module}")
    assert main(["train"]) == 2
    assert "needs transformers, which is not installed; pip install 'dyncp[transformers]'" in (
        capsys.readouterr().err
    )


def test_a_corpus_is_the_text_files_of_a_folder_in_the_order_of_their_paths(tmp_path):
    files = {"b.py": b"second", "a/x.txt": b"first file", "one.py": b"1", "binary": b"ab\0cd"}
    files |= {".hidden": b"hidden", ".git/config": b"hidden too", "c": bytes(range(1, 256))}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(text)
    corpus = train.TextCorpus(str(tmp_path), 6)
    texts = [bytes(corpus[i]["input_ids"].tolist()) for i in range(len(corpus))]
    assert texts == [b"first ", b"second", bytes(range(1, 7))]
    (tmp_path / "none").mkdir()
    for name, text in (("missing", "not a folder"), ("none", "no text files")):
        with pytest.raises(ValueError, match=text):
            train.TextCorpus(str(tmp_path / name), 10)


def test_the_standard_library_is_long_tailed():
    corpus = train.TextCorpus(None, 16_384)
    lengths = sorted(len(corpus[i]["input_ids"]) for i in range(len(corpus)))
    assert len(lengths) > 100
    assert lengths[0] < 1000 < lengths[-1] == 16_384
