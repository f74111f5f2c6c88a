"""The examples run, and give the same numbers on any number of ranks."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrun import run_under_torchrun

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


def numbers_of(name, num_ranks, words=(), wanted="loss"):
    result = run_under_torchrun(list(words), num_ranks, script=str(EXAMPLES / name))
    assert result.returncode == 0, result.stderr[-2000:]
    return [float(x) for x in re.findall(rf"{wanted} +(-?[0-9.e+-]+)", result.stdout)]


@pytest.mark.xdist_group("processes")
def test_policy_gradients_are_those_of_one_process():
    one, three = (numbers_of("policy_gradient.py", ranks) for ranks in (1, 3))
    assert len(one) == 4
    assert three == pytest.approx(one, rel=1e-5)
    penalties = [numbers_of("policy_gradient.py", ranks, wanted="penalty") for ranks in (1, 2)]
    assert penalties[1] == pytest.approx(penalties[0], rel=1e-3)
    assert penalties[0][-1] > 0


@pytest.mark.timeout(900)  # three starts of up to 4 processes each
@pytest.mark.xdist_group("processes")
def test_the_demo_finds_a_llama_equal_on_any_ranks_and_after_resuming():
    """Its own table is the proof; 4 ranks, 1 rank, and 2 that resume at step 3."""
    size = ["--steps", "4", "--max-length", "500", "--tokens-per-batch", "1200"]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), *size],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Losses and gradient norms agree" in run.stdout
    header, *rows = run.stdout.split("4 ranks\n")[-1].splitlines()
    assert header.split()[:6] == ["step", "docs", "pieces", "plain", "1", "rank"]
    found = [
        [float(x.replace(",", "")) for x in row.replace(" - ", " nan ").split()] for row in rows[:4]
    ]
    assert [row[0] for row in found] == [1, 2, 3, 4]
    for number, row in enumerate(found, start=1):
        _, documents, pieces, plain, one, four, resumed, differs, *_, moved, ring, _ = row
        assert pieces > documents  # split over ranks
        assert [one, four] == pytest.approx([plain] * 2, rel=1e-5)
        assert resumed == pytest.approx(plain if number > 2 else math.nan, rel=1e-5, nan_ok=True)
        assert differs < 1e-5
        assert 0 < moved < ring
    assert found[-1][3] < found[0][3]


@pytest.mark.parametrize(
    ("fault", "agrees"), [({}, True), ({"loss": 2.001}, False), ({"norm": math.nan}, False)]
)
def test_the_demo_notices_other_numbers(monkeypatch, capsys, fault, agrees):
    monkeypatch.syspath_prepend(EXAMPLES)
    import demo

    expected = {1: {"loss": 2.0, "norm": 1.0}}
    row = expected[1] | {"documents": [7], "pieces": 2, "tokens": 10, "seconds": 1.0}
    row |= {"imbalance": 1.0, "moved_bytes": 1, "stall": 0.0}
    worst = demo.compare(expected, {1: row}, [{1: row | fault}, {}])
    assert (worst <= demo.TOLERANCE) is agrees


def test_the_script_to_copy_is_short_and_says_how_to_start_it():
    script = EXAMPLES / "train_llama.py"
    assert len(script.read_text().splitlines()) < 200
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 1
    assert run.stderr.endswith("start it with torchrun --nproc-per-node N\n")
