"""ModelConfig: the sizes of a Transformer, which give its attention shape and its per-token work
outside attention; read from models and configs as users have them."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dyncp.blocks import ITEM_BYTES, AttentionShape, Direction, checked_dtype, dtype_name
from dyncp.checks import read_json_file, whole_number
from dyncp.cost.profile import Profile
from dyncp.cost.step_traffic import StepTraffic
from dyncp.topology import Topology


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder. `mlp_matrices` is 3 for gated MLPs and 2 for plain ones.

    `ffn` is the hidden size of the MLP that a token passes through in a layer; in a mixture of
    experts, the sum over the token's experts, shared ones included. `experts` is the number of
    experts that the router chooses from (0: no router). `dtype` is the dtype of q, k and v: a
    name ("bf16") or a torch dtype, stored by its name. `positions` is the number of positions that
    the model was trained with (None: unknown); if they are `learned_positions`, there are no more.
    `tp` is the number of tensor-parallel ranks among which these sizes were `divided`. `traffic` is
    what a step moves besides attention (None: not priced).
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
    dtype: str | Any = "bf16"
    positions: int | None = None
    learned_positions: bool = False
    tp: int = 1
    traffic: StepTraffic | None = None

    @staticmethod
    def of(model: Any, dtype: Any = None) -> "ModelConfig":
        """The sizes of a Transformers model, of its config (an object or a dict), or of a
        config.json, given as its path or its folder. `dtype` is that of q, k and v if it differs
        from the model's (under autocast, for example).

        In a mixture of experts, every layer has the experts that one token is routed to. Tied
        embeddings change memory, not FLOPs.
        """
        config = getattr(model, "config", model)
        chosen = dtype or _dtype_of(model) or _dtype_of(config)
        if isinstance(config, ModelConfig):
            return replace(config, dtype=chosen)
        if isinstance(config, str | Path):
            config = _read_config(Path(config))
        entries = config.to_dict() if hasattr(config, "to_dict") else config
        if isinstance(entries, Mapping):
            return _sizes(entries, chosen)
        raise ValueError(
            f"model is {type(model).__name__}; expected an AttentionShape, a ModelConfig, a "
            "Transformers config (object or dict), or a model whose .config is one"
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", checked_dtype("dtype", self.dtype))
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

        The embedding is a lookup, and norms and activations are not counted: Llama-3-8B has 8.03e9
        weights, of which 0.53e9 are embeddings, so a token takes 2 × 7.50e9 FLOPs forward.
        """
        forward = 2.0 * (self.layers * self.layer_weights + self.hidden * self.vocab)
        return 2 * forward if direction is Direction.BACKWARD else forward

    def seconds_per_token(self, profile: Profile, direction: Direction) -> float:
        """Seconds of linear layers and, with tensor parallelism, of summing activations twice per
        layer (or of the gathers and scattered sums of sequence parallelism, which move as much)."""
        computed = self.flops_per_token(direction) / profile.dense
        sent = 4 * (self.tp - 1) / self.tp * self.hidden * ITEM_BYTES[self.attention_shape().dtype]
        return computed + self.layers * sent / profile.intra.bandwidth

    def traffic_seconds(self, topology: Topology) -> float:
        """Seconds per batch that links need for gradients and weights."""
        if self.traffic is None:
            return 0.0
        weights = self.layers * self.layer_weights + 2 * self.hidden * self.vocab
        return self.traffic.seconds(float(weights), topology)

    def divided(self, parts: int) -> "ModelConfig":
        """Sizes for one of `parts` tensor-parallel ranks: its share of heads, MLP and
        vocabulary."""
        shape = self.attention_shape().divided(parts)
        ffn, vocab = -(-self.ffn // parts), -(-self.vocab // parts)
        heads, kv_heads, tp = shape.q_heads, shape.kv_heads, self.tp * parts
        return replace(self, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, tp=tp)

    def attention_shape(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.dtype)


# Names of each size in different model families, the most common first.
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
LAYERS_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
HEADS_KEYS = ("num_attention_heads", "n_head", "num_heads")
FFN_KEYS = ("intermediate_size", "n_inner", "ffn_dim")
EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
POSITIONS_KEYS = ("max_position_embeddings", "n_positions")
# Families whose positions are learned, so that others do not exist.
LEARNED_POSITIONS = {"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"}
# Families whose MLP has two matrices, without a gate.
PLAIN_MLP = {
    "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi",
    "starcoder2",
}  # fmt: skip


def model_shape(model: Any, parts: int = 1) -> tuple[AttentionShape, ModelConfig | None]:
    """The attention shape of `model` on one rank, and the model's sizes there if known.

    A model is divided among `parts` tensor-parallel ranks; a given AttentionShape is not: it must
    be the shape on one rank. Without a model, one of the usual shape is assumed.
    """
    if model is None or isinstance(model, AttentionShape):
        return model or AttentionShape.assumed(), None
    sizes = ModelConfig.of(model)
    if sizes.tp not in (1, parts) and parts > 1:
        raise ValueError(
            f"the model was divided among {sizes.tp} tensor-parallel ranks; the mesh has {parts}"
        )
    if sizes.tp == 1:
        sizes = sizes.divided(parts)
    return sizes.attention_shape(), sizes


def _sizes(config: Mapping[str, Any], dtype: Any) -> ModelConfig:
    """Sizes from the content of a config.json."""
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
        dtype=dtype or _dtype_of(config) or "bf16",
        positions=_size(config, POSITIONS_KEYS, 0) or None,
        learned_positions=config.get("model_type") in LEARNED_POSITIONS,
    )


def _dtype_of(model: Any) -> str | None:
    """The name of the dtype in a model's config or of its weights; None if unknown."""
    of = model.get if isinstance(model, Mapping) else partial(getattr, model)
    found = of("dtype", None) or of("torch_dtype", None)
    if found is None and hasattr(model, "parameters"):
        found = next((weight.dtype for weight in model.parameters()), None)
    return dtype_name(found)


def _read_config(path: Path) -> Mapping[str, Any]:
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
