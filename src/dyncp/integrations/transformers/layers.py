"""What the attention layers of a model need, read from its config; what cannot run is refused."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from dyncp.plan import DEFAULT_MASK

# Architectures whose losses and weights equal those of one process: benchmarks/parity.py.
TESTED = (
    "cohere2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "lfm2", "llama", "mistral",
    "olmo2", "olmo3", "opt", "phi3", "qwen3", "qwen3_moe", "qwen3_next", "smollm3",
)  # fmt: skip
# RoPE whose frequencies depend on the largest position of the batch.
RESCALED_ROPE = ("dynamic", "longrope")


class Mixer(NamedTuple):
    """Layers that mix tokens by state: the name of the module in a decoder layer; the config's name
    for how many tokens it looks at, or None where its state is of whole documents."""

    module: str
    kernel: str | None = None


# By architecture and type of layer; `mixers.py` runs them. Others are refused.
MIXERS = {
    ("lfm2", "conv"): Mixer("conv", "conv_L_cache"),
    ("qwen3_next", "linear_attention"): Mixer("linear_attn"),
}


@dataclass(frozen=True, slots=True)
class LayerMask:
    """The mask that a layer needs: that of the samples, or near keys of it. `name` is its name in
    plans, and tells the size: a plan for another window does not have it."""

    name: str = DEFAULT_MASK
    window: int | None = None
    chunk: int | None = None

    @property
    def size(self) -> int | None:
        return self.chunk if self.window is None else self.window


def layer_masks(config: Any) -> tuple[LayerMask, ...]:
    """One per layer, from `layer_types`, or the window that all layers have."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = "full_attention" if _window(config) is None else "sliding_attention"
        kinds = [kind] * config.num_hidden_layers
    return tuple(_layer_mask(number, kind, config) for number, kind in enumerate(kinds))


def _layer_mask(number: int, kind: str, config: Any) -> LayerMask:
    if kind == "full_attention" or (config.model_type, kind) in MIXERS:
        return LayerMask()
    if kind == "sliding_attention":
        window = int(config.sliding_window)
        return LayerMask(f"window_{window}", window=window)
    if kind == "chunked_attention":
        chunk = int(config.attention_chunk_size)
        return LayerMask(f"chunk_{chunk}", chunk=chunk)
    raise ValueError(
        f"layer {number} of {config.model_type} is of type {kind!r}, which needs whole sequences "
        "in order, and ranks have parts of them; allowed are full_attention, sliding_attention, "
        f"chunked_attention and {', '.join(f'{kind} of {model}' for model, kind in MIXERS)}"
    )


def _window(config: Any) -> int | None:
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def check_model(model: Any, *, untested: bool) -> Any:
    """The text config of a model that can run; raises ValueError where it cannot."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"attach got {type(model).__name__}; expected a Transformers model, before it is "
            "wrapped by DDP or compiled"
        )
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{name} has its own attention code and ignores set_attn_implementation; dyncp cannot "
            "run it"
        )
    if getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        raise ValueError(
            f"{name} has loss {model.loss_type!r}; allowed are causal language models, and base "
            "models without a loss"
        )
    _check_config(config, name)
    layer_masks(config)
    if config.model_type not in TESTED and not untested:
        raise ValueError(
            f"{name} ({config.model_type}) has not been compared with one process; tested are "
            f"{', '.join(TESTED)}. attach(model, untested=True) runs it; compare losses yourself"
        )
    return config


def _check_config(config: Any, name: str) -> None:
    refused = {
        "attn_logit_softcapping": "a softcap on attention scores",
        "alibi": "ALiBi biases on attention scores",
        "use_bidirectional_attention": "attention in both directions",
        "add_cross_attention": "cross attention",
    }
    for option, what in refused.items():
        if getattr(config, option, None):
            raise ValueError(
                f"{name} has {what} ({option}={getattr(config, option)!r}), which dyncp's kernels "
                "do not have; results would be wrong without it"
            )
    if not getattr(config, "is_causal", True) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is not causal; allowed are causal decoders")
    if getattr(config, "layerdrop", 0):
        raise ValueError(
            f"{name} has layerdrop={config.layerdrop}: every rank would leave out other layers and "
            "wait for the rest forever; set config.layerdrop = 0"
        )


def needs_largest_position(config: Any) -> bool:
    """Whether RoPE takes a factor from the largest position of the batch."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [x for x in parameters.values() if isinstance(x, dict)] or [parameters]
    kinds = {str(entry.get("rope_type", "default")) for entry in by_layer}
    return any(kind in found for found in kinds for kind in RESCALED_ROPE)
