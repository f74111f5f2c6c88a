"""The code of docs/transformers.md runs, from a model and texts on disk to a tuned model."""

import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra transformers is not installed")

from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from dyncp import sum_over_ranks
from processes import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
SENTENCE = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what a user has: a model with its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("user")
    vocabulary = {character: number for number, character in enumerate(sorted(set(SENTENCE)))}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, [])))
    tokenizer.save_pretrained(folder / "my-model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "my-model")
    (folder / "texts").mkdir()
    for number in range(12):
        (folder / f"texts/{number}.txt").write_text(SENTENCE * (number**2 % 17 + 1))
    return folder


def run_blocks(folder, *numbers):
    """Runs these code blocks with smaller batches on CPUs, and returns their variables."""
    os.chdir(folder)
    text = PAGE.read_text()
    for shown, here in (("65_536", "1000"), ('"cuda", (2, 4)', '"cpu", (1, 2)')):
        assert shown in text
        text = text.replace(shown, here)
    blocks, names = re.findall(r"```python\n(.*?)```", text, re.DOTALL), {}
    for number in numbers:
        exec(compile(blocks[number], f"{PAGE.name}, block {number}", "exec"), names)
    return names


def losses_of_rank(rank, folder):
    """The last loss of the loop, and the sum of the absolute gradients under FSDP."""
    names = run_blocks(folder, 0)
    loss = sum_over_ranks(names["loss"].detach()).item()
    sharded = run_blocks(folder, 0, 1)
    gradients = [p.grad.full_tensor() for p in sharded["model"].parameters()]
    return loss, sum(gradient.abs().sum().item() for gradient in gradients)


def test_fine_tuning_on_your_own_texts_with_your_own_mask(folder, monkeypatch):
    monkeypatch.chdir(folder)  # restored afterwards
    names = run_blocks(folder, 0, 2)
    first = [loss for loss, _ in run_ranks(losses_of_rank, 2, folder)]
    assert first[0] == first[1]
    assert first[0] == pytest.approx(names["loss"].item(), rel=1e-4)
    tuned = AutoModelForCausalLM.from_pretrained("tuned")
    assert tuned.config._attn_implementation == "sdpa"  # not dyncp
    tokens = AutoTokenizer.from_pretrained("my-model")(SENTENCE, return_tensors="pt")
    losses = [
        AutoModelForCausalLM.from_pretrained(name)(**tokens, labels=tokens["input_ids"]).loss
        for name in ("my-model", "tuned")
    ]
    assert losses[1] < losses[0]
    assert names["trainer"].state.global_step > 0
