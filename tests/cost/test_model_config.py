"""FLOPs per token outside attention, for known models and configs."""

import json
from pathlib import Path
from typing import Any

import pytest

from dyncp.blocks import AttentionShape, Direction
from dyncp.cost import ModelConfig, find_model, find_profile

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def test_llama_3_8b_takes_two_flops_per_weight_without_the_embedding() -> None:
    model = find_model("llama3_8b")
    weights, embedding, norms = 8_030_261_248, 128256 * 4096, 65 * 4096
    assert model.flops_per_token(FORWARD) == 2 * (weights - embedding - norms)
    assert model.flops_per_token(BACKWARD) == 2 * model.flops_per_token(FORWARD)
    profile = find_profile("h200")
    assert model.seconds_per_token(profile, FORWARD) == pytest.approx(15.009e9 / 650e12, rel=1e-3)


def test_linear_layers_are_most_of_an_8b_model_on_long_tailed_batches() -> None:
    pairs_per_token = 4500  # causal, 131,072 tokens with a lognormal tail
    attention = 32 * 4 * pairs_per_token * 128 * 32
    linear = find_model("llama3_8b").flops_per_token(FORWARD)
    assert linear / (linear + attention) == pytest.approx(0.87, abs=0.02)


def test_a_config_gives_the_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    expected = find_model("llama3_8b")
    assert ModelConfig.of(LLAMA) == expected
    assert ModelConfig.of(tmp_path) == expected
    assert ModelConfig.of(str(tmp_path / "config.json")) == expected
    assert ModelConfig.of({"text_config": LLAMA}) == expected
    assert expected.attention_shape() == AttentionShape(32, 8, 128)


def test_heads_may_have_a_size_of_their_own() -> None:
    model = ModelConfig.of(LLAMA | {"head_dim": 256})
    assert model.head_dim == 256
    assert model.layer_weights > ModelConfig.of(LLAMA).layer_weights


def test_a_mixture_counts_the_experts_of_one_token() -> None:
    qwen3_30b_a3b = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    model = ModelConfig.of(qwen3_30b_a3b)
    assert model.ffn == 8 * 768
    # 3.3e9 active weights, of which the embedding is 0.31e9
    assert model.flops_per_token(FORWARD) / 2 == pytest.approx(3.34e9 - 0.31e9, rel=0.02)
    mixtral = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}
    assert ModelConfig.of(mixtral).ffn == 2 * 14336
    shared = qwen3_30b_a3b | {"shared_expert_intermediate_size": 1000}
    assert ModelConfig.of(shared).ffn == 8 * 768 + 1000


def test_gpt2_has_other_names_and_a_plain_mlp() -> None:
    model = ModelConfig.of(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    )
    assert model == ModelConfig(
        768, 12, 3072, 50257, 12, 12, 64, mlp_matrices=2, learned_positions=True
    )
    assert model.flops_per_token(FORWARD) / 2 == pytest.approx(124e6, rel=0.01)  # tied embedding


def test_configs_that_say_too_little_or_something_else_are_refused(tmp_path: Path) -> None:
    without = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    with pytest.raises(ValueError, match="no vocab_size; it has model_type, hidden_size"):
        ModelConfig.of(without)
    with pytest.raises(ValueError, match="hidden_size is '4096'; it must be an integer"):
        ModelConfig.of(LLAMA | {"hidden_size": "4096"})
    with pytest.raises(ValueError, match="multi-head latent attention is not modelled"):
        ModelConfig.of(LLAMA | {"kv_lora_rank": 512})
    with pytest.raises(ValueError, match=r"ModelConfig.heads is 0; at least 1 is needed"):
        ModelConfig.of(LLAMA | {"num_attention_heads": 0})
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        ModelConfig.of(tmp_path / "nowhere")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="is a list, not a JSON object"):
        ModelConfig.of(tmp_path / "list.json")
    with pytest.raises(ValueError, match=r"'gpt5'; choose one of llama3_8b, .*, or give a config"):
        find_model("gpt5")


def test_tensor_parallel_ranks_share_heads_mlp_and_vocabulary():
    whole = ModelConfig(64, 2, 129, 101, 8, 2, 16)
    assert whole.divided(2) == ModelConfig(64, 2, 65, 51, 4, 1, 16, tp=2)
    assert whole.divided(1) == whole
    assert whole.attention_shape().divided(2) == whole.divided(2).attention_shape()
    with pytest.raises(ValueError, match="8 q heads and 2 kv heads; 4 tensor-parallel ranks can"):
        whole.divided(4)
