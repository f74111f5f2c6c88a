"""Reads the sizes of a model from a Transformers config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dyncp.checks import parse_json
from dyncp.cost.model_config import ModelConfig

# Names that a size has in different families, the usual one first.
HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
HEADS = ("num_attention_heads", "n_head", "num_heads")
FFN = ("intermediate_size", "n_inner", "ffn_dim")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Families whose MLP is two plain matrices.
PLAIN_MLP = {
    "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi",
    "starcoder2",
}  # fmt: skip


def from_transformers_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Sizes from a config.json (its path, its folder, or its content).

    Mixtures of experts count the experts that one token passes through, as if every layer were one.
    Tied embeddings change memory, not FLOPs.
    """
    config = source if isinstance(source, Mapping) else _read(Path(source))
    if not any(key in config for key in HIDDEN) and "text_config" in config:
        config = config["text_config"]
    if config.get("kv_lora_rank"):
        raise ValueError(
            "the config has kv_lora_rank: multi-head latent attention is not modelled; "
            "give a ModelConfig with the sizes that fit best"
        )
    hidden, heads = _size(config, HIDDEN), _size(config, HEADS)
    return ModelConfig(
        hidden=hidden,
        layers=_size(config, LAYERS),
        ffn=_ffn(config, hidden),
        vocab=_size(config, ("vocab_size",)),
        heads=heads,
        kv_heads=_size(config, ("num_key_value_heads",), heads),
        head_dim=_size(config, ("head_dim",), hidden // max(heads, 1)),
        mlp_matrices=2 if config.get("model_type") in PLAIN_MLP else 3,
        experts=_size(config, EXPERTS, 0),
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        path = path / "config.json" if path.is_dir() else path
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"model config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model config {path} is a {type(config).__name__}, not a JSON object")
    return config


def _ffn(config: Mapping[str, Any], hidden: int) -> int:
    active = _size(config, ("num_experts_per_tok",), 0)
    if not active:
        return _size(config, FFN, 4 * hidden if config.get("model_type") in PLAIN_MLP else None)
    expert = _size(config, ("moe_intermediate_size", *FFN))
    shared = _size(config, ("shared_expert_intermediate_size",), 0)
    return expert * (active + _size(config, ("n_shared_experts",), 0)) + shared


def _size(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise ValueError(f"model config: {name} is {value!r}; a whole number is needed")
        return value
    if default is None:
        raise ValueError(f"model config has no {' or '.join(names)}; it has {', '.join(config)}")
    return default
