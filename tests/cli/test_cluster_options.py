"""Options that say which model runs on which GPUs, and what a step moves besides attention."""

import json
from typing import Any

import pytest

from dyncp.cli import main
from dyncp.cli.simulate import OURS
from dyncp.cost import find_model

SMALL = ["--tokens", "4096", "--nodes", "2", "--batches", "1", "--methods", "zigzag,magi"]


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("name", "ranks"), [("gb200", 72), ("h100", 8), ("a100", 8)])
def test_nodes_have_as_many_ranks_as_the_preset(
    name: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--lengths", "2048,512", "--topology", name, "--nodes", "1"]
    for more, number in (([], ranks), (["--ranks-per-node", "4"], 4)):
        assert main([*words, *more]) == 0
        assert f"for {number} ranks" in capsys.readouterr().err


def test_a_rank_of_several_gpus_has_their_share_of_heads_and_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", "--sample", "ldc:0", *SMALL, "--topology", "a100", "--model", "llama3-8b"]
    whole = run_json(capsys, *words, "--ranks-per-node", "2")["methods"][OURS]
    shared = run_json(capsys, *words, "--tp", "4")["methods"][OURS]
    tokens = shared["parts"]["token_seconds"] / whole["parts"]["token_seconds"]
    assert 0.25 < tokens < 0.5  # a quarter of the work, and the sums of activations
    assert shared["forward_bytes"] < 0.5 * whole["forward_bytes"]


def test_heads_without_a_model_are_those_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """So --tp 4 with 8 heads is a rank's share of a decoder of 32 heads."""
    words = ["plan", "--lengths", "4096", "--nodes", "1", "--topology", "a100"]
    shared = run_json(capsys, *words, "--tp", "4")["simulated"]["token_seconds"]
    heads = ["--q-heads", "32", "--kv-heads", "8", "--ranks-per-node", "2"]
    whole = run_json(capsys, *words, *heads)["simulated"]["token_seconds"]
    assert 0.25 < shared / whole < 0.5


def test_gradients_that_nothing_hides_make_the_step_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["simulate", "--sample", "ldc:0", *SMALL, "--topology", "a100", "--model", "llama3-8b"]
    plain = run_json(capsys, *words)["methods"][OURS]
    moved = run_json(capsys, *words, "--gradients", "reduced", "--gathered", "layer")
    ours = moved["methods"][OURS]
    assert plain["parts"]["traffic_seconds"] == 0
    assert ours["parts"]["traffic_seconds"] > 0
    gained = ours["step_seconds"]["mean"] - plain["step_seconds"]["mean"]
    assert gained == pytest.approx(ours["parts"]["traffic_seconds"], rel=0.2)
    assert "gradients and weights" in moved["verdict"]


def test_static_methods_stand_in_their_own_code_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--sample", "ldc:0", *SMALL, "--attention-only"]
    methods = run_json(capsys, *words)["methods"]
    assert methods["zigzag"]["own_code_seconds"] > methods["zigzag"]["step_seconds"]["mean"]
    assert methods["magi"]["own_code_seconds"] is None  # not modelled
    assert methods[OURS]["own_code_seconds"] is None
    assert main(words) == 0
    rows = capsys.readouterr().out.splitlines()
    assert f"{1e3 * methods['zigzag']['own_code_seconds']:.2f}" in next(
        row for row in rows if row.startswith("zigzag")
    )


def test_models_come_from_names_folders_and_files(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = find_model("qwen3_4b")
    config = {
        "model_type": "qwen3",
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--lengths", "2048,512", "--topology", "h100", "--nodes", "1", "--model"]
    found = [
        run_json(capsys, *words, name)["simulated"]["step_seconds"]
        for name in ("Qwen3-4B", str(tmp_path), str(tmp_path / "config.json"))
    ]
    assert found[0] == found[1] == found[2] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tp", "3"], "--tp is 3, which does not divide the 8 GPUs of a node"),
        (["--tp", "0"], "--tp is 0; at least 1"),
        (["--attention-only", "--model", "llama3-8b"], "exclude each other"),
        (["--model", "llama9"], "model is 'llama9'; choose one of llama3_8b"),
        (["--gradients", "some"], "gradients is 'some'; choose one of none, reduced, sharded"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--lengths", "512", "--topology", "a100", *words]) == 2
    assert sentence in capsys.readouterr().err
