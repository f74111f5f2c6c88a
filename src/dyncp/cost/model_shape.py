"""Attention shapes of models: sizes, configs and models as users have them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dyncp.blocks import AttentionShape, dtype_name
from dyncp.cost.profile import ModelConfig, from_transformers_config


def model_shape(
    model: Any, dtype: Any = None, parts: int = 1
) -> tuple[AttentionShape, ModelConfig | None]:
    """The attention shape of `model` on one rank, and the model's sizes there if known.

    `dtype` is the dtype of q and kv ("bf16", or a torch dtype; default: the model's or config's).
    A model is divided among `parts` tensor-parallel ranks; a given AttentionShape is not: it must
    be the shape on one rank.
    """
    if model is None or isinstance(model, AttentionShape):
        shape = AttentionShape.assumed() if model is None else model
        return (replace(shape, dtype=dtype) if dtype else shape), None
    if isinstance(model, ModelConfig):
        model = model.divided(parts)
        return model.attention_shape(dtype or "bf16"), model
    config = getattr(model, "config", model)  # a Transformers model, or a config
    entries = config.to_dict() if hasattr(config, "to_dict") else config
    chosen = dtype or _dtype_of(model) or _dtype_of(config) or _dtype_of(entries) or "bf16"
    if hasattr(config, "attention_shape"):
        return config.attention_shape(chosen).divided(parts), None
    if isinstance(entries, Mapping):
        sizes = from_transformers_config(entries).divided(parts)
        return sizes.attention_shape(chosen), sizes
    raise ValueError(
        f"model is {type(model).__name__}; expected an AttentionShape, a ModelConfig, a "
        "Transformers config (object or dict), or a model whose .config is one"
    )


def _dtype_of(model: Any) -> str | None:
    """The name of the dtype in a model's config or of its weights; None if unknown."""
    of = model.get if isinstance(model, Mapping) else partial(getattr, model)
    found = of("dtype", None) or of("torch_dtype", None)
    if found is None and hasattr(model, "parameters"):
        found = next((weight.dtype for weight in model.parameters()), None)
    return dtype_name(found)
