"""ModelConfig: the per-token work of a Transformer outside attention, also from a config.json."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyncp.blocks import AttentionShape, Direction
from dyncp.checks import read_json_file, whole_number
from dyncp.cost.profile import Profile


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder. `mlp_matrices` is 3 for gated MLPs and 2 for plain ones.

    `ffn` is the hidden size of the MLP that a token passes through in a layer: for mixtures of
    experts the sum over its experts, the shared ones included. `experts` is what the router chooses
    from (0: no router).
    """

    hidden: int
    layers: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_matrices: int = 3
    experts: int = 0

    def __post_init__(self) -> None:
        for field in ("hidden", "layers", "ffn", "vocab", "heads", "kv_heads", "head_dim"):
            whole_number(f"ModelConfig.{field}", getattr(self, field), 1, sys.maxsize)
        if self.mlp_matrices not in (2, 3):
            raise ValueError(f"ModelConfig.mlp_matrices is {self.mlp_matrices}; it must be 2 or 3")

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that multiply every token: projections, router and MLP."""
        q_and_out = 2 * self.hidden * self.heads * self.head_dim
        k_and_v = 2 * self.hidden * self.kv_heads * self.head_dim
        mlp = self.mlp_matrices * self.hidden * self.ffn
        return q_and_out + k_and_v + mlp + self.hidden * self.experts

    def flops_per_token(self, direction: Direction) -> float:
        """FLOPs of the linear layers and the output head; backward takes twice as many.

        The embedding is a lookup, and norms and activations are left out: Llama-3-8B has 8.03e9
        weights, of which 0.53e9 are embeddings, so a token takes 2 × 7.50e9 FLOPs forward.
        """
        forward = 2.0 * (self.layers * self.layer_weights + self.hidden * self.vocab)
        return 2 * forward if direction is Direction.BACKWARD else forward

    def seconds_per_token(self, profile: Profile, direction: Direction) -> float:
        return self.flops_per_token(direction) / profile.dense

    def divided(self, parts: int) -> "ModelConfig":
        """What one of `parts` tensor-parallel ranks computes: its share of heads, MLP and
        vocabulary."""
        shape = self.attention_shape().divided(parts)
        ffn, vocab = -(-self.ffn // parts), -(-self.vocab // parts)
        return replace(self, heads=shape.q_heads, kv_heads=shape.kv_heads, ffn=ffn, vocab=vocab)

    def attention_shape(self, dtype: str | Any = "bf16") -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, dtype)


MODELS = {"llama3_8b": ModelConfig(4096, 32, 14336, 128256, 32, 8, 128)}


def find_model(name: str) -> ModelConfig:
    if name not in MODELS:
        raise ValueError(
            f"model is {name!r}; choose one of {', '.join(MODELS)}, or give a config.json"
        )
    return MODELS[name]


# What a size is called in different model families, the usual name first.
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
LAYERS_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
HEADS_KEYS = ("num_attention_heads", "n_head", "num_heads")
FFN_KEYS = ("intermediate_size", "n_inner", "ffn_dim")
EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families whose MLP is two plain matrices.
PLAIN_MLP = {
    "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi",
    "starcoder2",
}  # fmt: skip


def from_transformers_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Sizes from a config.json (its path, its folder, or its content).

    A mixture of experts counts the experts that one token is routed to, in every layer.
    Tied embeddings change memory, not FLOPs.
    """
    config = source if isinstance(source, Mapping) else _read(Path(source))
    if not any(key in config for key in HIDDEN_KEYS) and "text_config" in config:
        config = config["text_config"]
    if config.get("kv_lora_rank"):
        raise ValueError(
            "the config has kv_lora_rank: multi-head latent attention is not modelled; "
            "give a ModelConfig with the sizes that fit best"
        )
    hidden, heads = _size(config, HIDDEN_KEYS), _size(config, HEADS_KEYS)
    return ModelConfig(
        hidden=hidden,
        layers=_size(config, LAYERS_KEYS),
        ffn=_ffn(config, hidden),
        vocab=_size(config, ("vocab_size",)),
        heads=heads,
        kv_heads=_size(config, ("num_key_value_heads",), heads),
        head_dim=_size(config, ("head_dim",), hidden // max(heads, 1)),
        mlp_matrices=2 if config.get("model_type") in PLAIN_MLP else 3,
        experts=_size(config, EXPERTS_KEYS, 0),
    )


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if os.path.isdir(path) else path  # False for names too long
    config = read_json_file("model config", path)
    if not isinstance(config, dict):
        raise ValueError(f"model config {path} is a {type(config).__name__}, not a JSON object")
    return config


def _ffn(config: Mapping[str, Any], hidden: int) -> int:
    active = _size(config, ("num_experts_per_tok",), 0)
    if not active:
        usual = 4 * hidden if config.get("model_type") in PLAIN_MLP else None
        return _size(config, FFN_KEYS, usual)
    expert = _size(config, ("moe_intermediate_size", *FFN_KEYS))
    shared = _size(config, ("shared_expert_intermediate_size",), 0)
    return expert * (active + _size(config, ("n_shared_experts",), 0)) + shared


def _size(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise ValueError(f"model config: {name} is {value!r}; it must be an integer >= 0")
        return value
    if default is None:
        raise ValueError(f"model config has no {' or '.join(names)}; it has {', '.join(config)}")
    return default
