"""The examples run, and give the same numbers on any number of ranks."""

import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

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
def test_a_hybrid_model_trains_as_in_one_process():
    ranks = numbers_of("hybrid_model.py", 4)
    assert len(ranks) == 4
    assert ranks == pytest.approx(hybrid_losses(), rel=1e-5)


def hybrid_losses():
    """Losses of the example's model in fp64, one document after the other, with dense attention:
    a document alone needs neither a plan nor an order of rows."""
    example = runpy.run_path(str(EXAMPLES / "hybrid_model.py"))
    torch.manual_seed(0)
    model, samples = example["Hybrid"]().double(), example["samples"]()
    dense = partial(scaled_dot_product_attention, is_causal=True)
    model.forward.__globals__["attention"] = lambda _, *qkv: dense(
        *(x.transpose(0, 1)[None] for x in qkv)
    )[0].transpose(0, 1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    targets = sum(len(sample["input_ids"]) - 1 for sample in samples)
    for _ in range(4):
        total = 0.0
        for tokens in (sample["input_ids"] for sample in samples):
            logits = model(tokens[None], Alone(len(tokens)))[0, :-1]
            loss = cross_entropy(logits, tokens[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


class Alone:
    """In place of a step: one document, which is whole already."""

    def __init__(self, tokens):
        self.lengths = (tokens,)
        self.contiguous = self

    def halo(self, _):
        return self

    def to_contiguous(self, x):
        return x

    def add_halo(self, x, _):
        return x

    from_contiguous, drop_halo = to_contiguous, add_halo


@pytest.mark.xdist_group("processes")
def test_a_llama_resumes_on_other_ranks_where_it_was(tmp_path):
    size = ["--tokens-per-batch", "3000", "--max-length", "2500"]
    undisturbed = numbers_of("train_llama.py", 2, [*size, "--steps", "4"])
    saved = [*size, "--checkpoint", str(tmp_path)]
    begun = numbers_of("train_llama.py", 3, [*saved, "--steps", "2"])
    resumed = numbers_of("train_llama.py", 2, [*saved, "--steps", "4", "--resume"])
    assert begun + resumed == pytest.approx(undisturbed, rel=1e-5)
    assert undisturbed[-1] < undisturbed[0]
