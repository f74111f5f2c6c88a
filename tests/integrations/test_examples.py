"""The examples run, and give the same numbers on any number of ranks."""

import logging
import math
import re
import runpy
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from torchrun import run_under_torchrun

AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
EXAMPLES = Path(__file__).parents[2] / "examples"


def numbers_of(name, num_ranks, *wanted):
    """The numbers after each of the words `wanted` in the output of an example."""
    result = run_under_torchrun([], num_ranks, script=str(EXAMPLES / name))
    assert result.returncode == 0, result.stderr[-2000:]
    found = [re.findall(rf"{word} +(-?[0-9.e+-]+)", result.stdout) for word in wanted]
    return [list(map(float, numbers)) for numbers in found]


def test_policy_gradients_are_those_of_one_process():
    one, three = (numbers_of("policy_gradient.py", n, "loss", "penalty") for n in (1, 3))
    (losses, penalties), (found_losses, found_penalties) = one, three
    assert len(losses) == 4
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert found_penalties == pytest.approx(penalties, rel=1e-3)
    assert penalties[-1] > 0


def test_policy_gradients_on_trees_are_those_of_separate_sequences():
    """Plain Transformers, with every prompt and answer as a sequence of its own."""
    example = import_module("examples.policy_gradient")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(example.SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    samples, advantages = example.rollouts()
    count = sum(int((sample["labels"] != -100).sum()) for sample in samples)
    paths = []
    for sample, advantage in zip(samples, advantages, strict=True):
        prompt, *answers = sample["input_ids"].split(sample["node_lengths"])
        gains = advantage.split(sample["node_lengths"])[1:]
        paths += [(prompt, *pair) for pair in zip(answers, gains, strict=True)]
    losses, penalties, old = [], [], None
    for _ in range(example.STEPS):
        logs = []
        for prompt, answer, _ in paths:
            logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
            logs.append(logits.log_softmax(-1).gather(1, answer[:, None])[:, 0])
        old = [log.detach() for log in logs] if old is None else old
        loss, changes = 0, []
        for log, before, (_, _, gain) in zip(logs, old, paths, strict=True):
            ratio = (log - before).exp()
            clipped = ratio.clamp(1 - example.CLIP, 1 + example.CLIP)
            loss = loss - torch.minimum(ratio * gain, clipped * gain).sum() / count
            changes.append((log - before).mean())
        penalty = torch.stack(changes).square().mean()
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
        losses.append(loss.item())
        penalties.append(penalty.item())
    found = numbers_of("policy_gradient.py", 1, "loss", "penalty")
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1] == pytest.approx(penalties, rel=1e-3, abs=1e-9)


@pytest.fixture
def demo_starts_ranks(monkeypatch):
    """The demo's ranks, started by torchrun in a full run."""
    demo = import_module("examples.demo")
    level, logger = logging.getLogger("dyncp").level, logging.getLogger("dyncp")

    def launch(words, num_ranks):
        script, *rest = words
        done = run_under_torchrun(rest, num_ranks, script=script, timeout=280)
        sys.stdout.write(done.stdout + done.stderr)
        return done.returncode

    monkeypatch.setattr(demo, "launch", launch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as the demo does
    yield demo
    logger.setLevel(level)


@pytest.mark.timeout(900)  # three starts of up to 4 processes each
def test_the_demo_finds_a_llama_equal_on_any_ranks_and_after_resuming(
    demo_starts_ranks, monkeypatch, capsys
):
    """Reads the table that the demo prints. The resumed run continues at step 3 on 2 ranks."""
    size = ["--steps", "4", "--max-length", "500", "--tokens-per-batch", "1200"]
    monkeypatch.setattr(sys, "argv", ["demo", *size])
    code, printed = demo_starts_ranks.main(), capsys.readouterr().out
    assert code == 0, printed
    assert "Losses and gradient norms agree" in printed
    header, *rows = printed.split("4 ranks\n")[-1].splitlines()
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
def test_the_demo_notices_different_numbers(fault, agrees):
    demo = import_module("examples.demo")
    expected = {1: {"loss": 2.0, "norm": 1.0}}
    row = expected[1] | {"documents": [7], "pieces": 2, "tokens": 10, "seconds": 1.0}
    row |= {"imbalance": 1.0, "moved_bytes": 1, "stall": 0.0}
    worst = demo.compare(expected, {1: row}, [{1: row | fault}, {}])
    assert (worst <= demo.TOLERANCE) is agrees


def test_the_script_to_copy_is_short_and_says_how_to_start_it(monkeypatch):
    script = EXAMPLES / "train_llama.py"
    assert len(script.read_text().splitlines()) < 200
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit, match=r"start it with torchrun --nproc-per-node N$"):
        runpy.run_path(str(script), run_name="__main__")


def test_a_hybrid_model_trains_as_in_one_process():
    (ranks,) = numbers_of("hybrid_model.py", 4, "loss")
    assert len(ranks) == 4
    assert ranks == pytest.approx(hybrid_losses(), rel=1e-5)


def hybrid_losses():
    """Losses of the example's model in fp64, document by document, with dense attention. A single
    document needs neither a plan nor an order of rows."""
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
    """Replaces a step for a single document, whose rows are already contiguous."""

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
