"""The code in docs/training.md runs, on one rank and on two processes."""

import re
from pathlib import Path

import pytest
import torch

from processes import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def run_page():
    """Runs all code blocks of the page in order, and returns its variables."""
    torch.manual_seed(0)
    names = {}
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    return names


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(results_of_rank, 2)


def results_of_rank(rank):
    """The page's perplexities, and the gradients of one step: by DDP, and by `sum_gradients`."""
    names = run_page()
    model, plain = names["model"], names["next_token_loss"]
    data, plan = next(iter(names["loader"]))
    step = names["executor"].prepare(plan)

    def flat_gradients():
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()
        model.zero_grad()
        return gradient

    model.zero_grad()
    plain(names["wrapped"](data, step), data).backward()
    names["sum_gradients"](model)
    averaged = flat_gradients()
    plain(model(data, step), data).backward()
    names["sum_gradients"](model)
    return names["perplexity"], averaged, flat_gradients()


def test_the_page_runs_on_one_rank_and_on_two_with_equal_results(two_ranks):
    alone = torch.tensor(run_page()["perplexity"])
    assert len(alone) == 6
    assert alone.isfinite().all()
    for together, _, _ in two_ranks:
        torch.testing.assert_close(torch.tensor(together), alone, rtol=1e-4, atol=0)


def test_gradients_are_summed_also_if_ddp_has_averaged_them(two_ranks):
    for _, averaged, summed in two_ranks:
        torch.testing.assert_close(torch.from_numpy(averaged), torch.from_numpy(summed))
        assert abs(summed).max() > 1e-3
