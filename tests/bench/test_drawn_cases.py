"""The script that draws cases of the whole path finds right ones right and wrong ones wrong."""

import numpy as np
import torch
from benchmarks import drawn_cases
from benchmarks.drawn_masks import draw_mask

from sizes import pick


def test_drawn_cases_are_right(capsys):
    cases = pick(3, 8)
    assert drawn_cases.run_cases(0, iter(range(cases))) == 0
    assert f"{cases} cases of seed 0: {cases} right, 0 wrong" in capsys.readouterr().out


def test_a_wrong_gradient_is_found_and_named(capsys, monkeypatch):
    right = drawn_cases.run_planned

    def wrong(*arguments: object) -> list[torch.Tensor]:
        out, dq, *others = right(*arguments)
        return [out, dq + 0.2, *others]

    monkeypatch.setattr(drawn_cases, "run_planned", wrong)
    assert drawn_cases.run_cases(0, iter([0])) == 1
    assert "--seed 0 --only 0: WrongError('dq is off by" in capsys.readouterr().out


def test_drawn_masks_allow_what_their_matrices_say():
    rng = np.random.default_rng(0)
    for _ in range(300):
        drawn = draw_mask(rng, int(rng.integers(1, 40)))
        assert (drawn.mask.dense() == drawn.allowed).all(), drawn.mask
