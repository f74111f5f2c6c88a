"""The examples run, and give the same numbers on any number of ranks."""

import re
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


@pytest.mark.xdist_group("processes")
def test_a_llama_resumes_on_other_ranks_where_it_was(tmp_path):
    size = ["--tokens-per-batch", "3000", "--max-length", "2500"]
    undisturbed = numbers_of("train_llama.py", 2, [*size, "--steps", "4"])
    saved = [*size, "--checkpoint", str(tmp_path)]
    begun = numbers_of("train_llama.py", 3, [*saved, "--steps", "2"])
    resumed = numbers_of("train_llama.py", 2, [*saved, "--steps", "4", "--resume"])
    assert begun + resumed == pytest.approx(undisturbed, rel=1e-5)
    assert undisturbed[-1] < undisturbed[0]
