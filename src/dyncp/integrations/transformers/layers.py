"""The masks that the layers of a model need, read from its config and derived from the masks of
samples, and the checks that refuse models that cannot run under dyncp."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from dyncp.blocks import AttentionShape
from dyncp.checks import instance_of
from dyncp.masks import Mask, MaskFunction, NamedMasks, named, window_of, windows_of, within
from dyncp.plan import DEFAULT_MASK

logger = logging.getLogger(__name__)

OLDEST = "5.22"  # version required by the extra `transformers`

# Architectures whose losses and weights equal those of one process (benchmarks/parity.py).
TESTED = (
    "cohere2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "lfm2", "llama", "mistral",
    "olmo2", "olmo3", "opt", "phi3", "qwen3", "qwen3_moe", "qwen3_next", "smollm3",
)  # fmt: skip
# RoPE whose frequencies depend on the largest position of the batch.
RESCALED_ROPE = ("dynamic", "longrope")
# Modules that mix rows in the order in which they are stored.
ORDERED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


class Mixer(NamedTuple):
    """A layer with state: the name of its module in a decoder layer, and the config option with the
    number of tokens that it looks at (None if its state covers whole documents)."""

    module: str
    kernel: str | None = None


# By architecture and layer type; `functions.py` runs them. Other layers with state are refused.
MIXERS = {
    ("lfm2", "conv"): Mixer("conv", "conv_L_cache"),
    ("qwen3_next", "linear_attention"): Mixer("linear_attn"),
}


# Local attention by layer type: the keyword of `masks.within`, and the config option with its size.
LOCAL = {
    "sliding_attention": ("window", "sliding_window"),
    "chunked_attention": ("chunk", "attention_chunk_size"),
}


class LayerMask(NamedTuple):
    """The mask that a layer needs: the sample's mask, or its part within a `kind` ("window" or
    "chunk") of `size` positions. `name` is its name in plans; it contains the size, so a plan for
    another window does not have it."""

    name: str = DEFAULT_MASK
    kind: str = ""
    size: int | None = None


def layer_masks(config: Any) -> tuple[LayerMask, ...]:
    """The mask of every layer, by the config's `layer_types`, or else by its `sliding_window`."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        has_window = getattr(config, "use_sliding_window", True) is not False
        has_window = has_window and getattr(config, "sliding_window", None) is not None
        kind = "sliding_attention" if has_window else "full_attention"
        kinds = [kind] * config.num_hidden_layers
    return tuple(_layer_mask(number, kind, config) for number, kind in enumerate(kinds))


def _layer_mask(number: int, kind: str, config: Any) -> LayerMask:
    if kind == "full_attention" or (config.model_type, kind) in MIXERS:
        return LayerMask()
    if kind in LOCAL:
        keyword, option = LOCAL[kind]
        size = int(getattr(config, option))
        return LayerMask(f"{keyword}_{size}", keyword, size)
    raise ValueError(
        f"layer {number} of {config.model_type} is of type {kind!r}, which needs whole sequences "
        f"in order, but ranks hold parts of them; allowed are full_attention, {', '.join(LOCAL)} "
        f"and {', '.join(f'{kind} of {model}' for model, kind in MIXERS)}"
    )


def check_model(model: Any, *, untested: bool) -> Any:
    """The text config of a model; ValueError if the model cannot run under dyncp."""
    from transformers import PreTrainedModel

    _check_version()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"attach got {type(model).__name__}; expected a Transformers model, before it is "
            "compiled or wrapped by DDP or PEFT"
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
    if hasattr(model, "_loss_function"):
        raise ValueError(
            f"{name} was given a loss_function of its own, which may shift labels or average over "
            "this rank's targets; compute the loss from the model's logits instead, as "
            "dyncp.next_token_loss does"
        )
    _check_config(config, name)
    layer_masks(config)
    _check_modules(model, config)
    if not (untested or _is_tested(model, config)):
        raise ValueError(
            f"{name} ({model.config.model_type}) has not been compared with one process; tested "
            f"are Transformers' own {', '.join(TESTED)}. attach(model, untested=True) first "
            "compares the model with its own attention on a small batch"
        )
    return config


@cache
def _check_version() -> None:
    """Warns of a Transformers version that is too old, whose errors would not say so."""
    from packaging.version import Version
    from transformers import __version__

    if Version(__version__) < Version(OLDEST):
        logger.warning("transformers is %s; dyncp is tested from %s on", __version__, OLDEST)


def _is_tested(model: Any, config: Any) -> bool:
    """Whether the architecture is tested. Classes outside Transformers are not, because they may
    have other layers; nor are models with towers for images or audio."""
    own = type(model).__module__.startswith("transformers.models.")
    return own and config is model.config and config.model_type in TESTED


def _check_modules(model: Any, config: Any) -> None:
    handled = {mixer.module for (kind, _), mixer in MIXERS.items() if kind == config.model_type}
    for path, module in text_modules(model):
        if isinstance(module, ORDERED) and not handled & set(path.split(".")):
            raise ValueError(
                f"{path} of {type(model).__name__} is {type(module).__name__}, which needs whole "
                "sequences in order, but ranks hold parts of them; dyncp cannot run it"
            )


def text_modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The named modules of the text decoder. Towers for images or audio are left out, because an
    attached model is not called with such inputs."""
    config = model.config.get_text_config(decoder=True)
    decoder = model if config is model.config else model.get_decoder()
    found: Iterator[tuple[str, nn.Module]] = decoder.named_modules()
    return found


def _check_config(config: Any, name: str) -> None:
    refused = {
        "alibi": "ALiBi biases on attention scores",
        "use_bidirectional_attention": "attention in both directions",
        "add_cross_attention": "cross attention",
        "output_attentions": "attention scores among its outputs",
        "kv_lora_rank": "multi-head latent attention, whose keys and values differ in width",
    }
    refused |= {
        option: "a softcap on attention scores"
        for option in config.to_dict()
        if "softcap" in option and "final" not in option  # the model itself caps final logits
    }
    for option, what in refused.items():
        if getattr(config, option, None):
            raise ValueError(
                f"{name} has {what} ({option}={getattr(config, option)!r}), which dyncp's kernels "
                "do not support; results would be wrong without it"
            )
    if not getattr(config, "is_causal", True) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is not causal; allowed are causal decoders")
    if getattr(config, "layerdrop", 0):
        raise ValueError(
            f"{name} has layerdrop={config.layerdrop}: ranks would skip different layers and wait "
            "for each other forever; set config.layerdrop = 0"
        )


def check_shape(model: Any, shape: AttentionShape) -> None:
    """Raises ValueError if a layer does not have the heads that the loader plans, which are the
    same for all layers."""
    planned = {"head_dim": shape.head_dim}
    if getattr(model, "tp_size", None) is None:  # otherwise modules have their rank's share
        planned |= dict.fromkeys(("k_proj", "v_proj"), shape.kv_heads * shape.head_dim)
    for path, module in text_modules(model):
        if not hasattr(module, "layer_idx"):
            continue
        for name, wanted in planned.items():
            found = getattr(module, name, None)
            found = getattr(found, "out_features", found)
            if isinstance(found, int) and found != wanted:
                raise ValueError(
                    f"{path} of {type(model).__name__} has {name} of size {found}; according to "
                    f"the config it is {wanted} ({shape.kv_heads} kv heads of head_dim "
                    f"{shape.head_dim}), and plans are made for one shape in all layers"
                )


def needs_largest_position(model: Any) -> bool:
    """Whether RoPE scales with the largest position of the batch, according to the config or to a
    module that sets it independently of the config."""
    config = model.config.get_text_config(decoder=True)
    given = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    given += [getattr(module, "rope_type", None) for _, module in text_modules(model)]
    return any(kind in str(given) for kind in RESCALED_ROPE)  # str: it may be a dict by layer type


@dataclass(frozen=True)
class SampleMasks:
    """Calls a user's mask function once per sample, and derives the masks of all layers from its
    result. If it returns masks by name, it must return every mask that the layers need."""

    function: Callable[[Any], Any]
    layers: tuple[LayerMask, ...]

    def __call__(self, sample: Any) -> dict[str, Mask]:
        found = self.function(sample)
        if not isinstance(found, Mapping):
            _compare_windows([window_of(found)] if isinstance(found, Mask) else [], self.layers)
            return {layer.name: _near(found, layer) for layer in self.layers}
        _check_names(found, self.layers)
        for layer in self.layers:
            _compare_windows([_reach(found[layer.name])], [layer])
        return dict(found)


def model_masks(mask_fn: Any, layers: Iterable[LayerMask]) -> Callable[[Any], Any]:
    """A function of a sample that returns the masks of all layers by name. If `mask_fn` also takes
    lengths, so does the result."""
    layers = tuple(dict.fromkeys(layers))
    if isinstance(mask_fn, MaskFunction):
        _compare_windows(windows_of(mask_fn), layers)
        return named(**{layer.name: _near(mask_fn, layer) for layer in layers})
    if isinstance(mask_fn, NamedMasks):
        _check_names(mask_fn.functions, layers)
        for layer in layers:
            _compare_windows(windows_of(mask_fn.functions[layer.name]), [layer])
        return mask_fn
    instance_of("mask_fn", mask_fn, Callable, "a function of a sample, such as masks.causal")
    return SampleMasks(mask_fn, layers)


def _compare_windows(given: Iterable[int | None], layers: Iterable[LayerMask]) -> None:
    """Warns of windows of the user's that are wider than the model's."""
    widest = max((window for window in given if window is not None), default=0)
    for layer in layers:
        if layer.size is not None and widest > layer.size:
            _warn_of_window(layer.kind, layer.size)


@cache
def _warn_of_window(kind: str, size: int) -> None:
    """Warns once."""
    logger.warning(
        "the mask function attends further than some layers of the model, which have a %s of %d "
        "positions. If it returns one mask, these layers see no more than their %s; if it names "
        "the masks of layers, they see what it says, other than the model was made for",
        kind,
        size,
        kind,
    )


def _reach(mask: Any) -> int | None:
    """How many positions a mask looks back at most, up to the token's own."""
    if not isinstance(mask, Mask):
        return None
    positions, first = mask.resolved_positions(), mask.ranges[:, 0, 0]
    some = np.flatnonzero(mask.ranges[:, 0, 1] > first)
    return int((positions[some] - positions[first[some]]).max(initial=0)) + 1


def _near(mask: Any, layer: LayerMask) -> Any:
    return mask if layer.size is None else within(mask, **{layer.kind: layer.size})


def _check_names(found: Iterable[str], layers: Iterable[LayerMask]) -> None:
    missing = [layer.name for layer in layers if layer.name not in found]
    if missing:
        raise ValueError(
            f"the mask function returns masks named {', '.join(found)}; the model's layers also "
            f"need {', '.join(missing)}. Return a single mask, and the others are derived from it"
        )
