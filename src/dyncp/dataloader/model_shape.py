"""What `model=` may be: a shape, sizes, a Transformers config, or a model that has one."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dyncp.blocks import AttentionShape, dtype_name
from dyncp.cost import ModelConfig, from_transformers_config

logger = logging.getLogger(__name__)


def shape_of(model: Any, dtype: Any = None) -> tuple[AttentionShape, ModelConfig | None]:
    """The attention shape of `model`, and its sizes where they are known.

    `dtype` is that of q and kv ("bf16", or torch's); by default what the model or its config says.
    """
    if model is None or isinstance(model, AttentionShape):
        shape = AttentionShape.assumed() if model is None else model
        return (replace(shape, dtype=dtype) if dtype else shape), None
    if isinstance(model, ModelConfig):
        return model.attention_shape(dtype or "bf16"), model
    config = getattr(model, "config", model)  # a Transformers model, or a config
    entries = config.to_dict() if hasattr(config, "to_dict") else config
    chosen = dtype or _dtype_of(model) or _dtype_of(config) or _dtype_of(entries) or "bf16"
    if hasattr(config, "attention_shape"):
        return config.attention_shape(chosen), None
    if isinstance(entries, Mapping):
        sizes = from_transformers_config(entries)
        return sizes.attention_shape(chosen), sizes
    raise ValueError(
        f"model is {type(model).__name__}; allowed are an AttentionShape, a ModelConfig, a "
        "Transformers config (object or dict), or a model whose .config is one"
    )


def tell_assumption(rank: int | None) -> None:
    """One line, on rank 0, for plans that are made without a model."""
    if not rank:
        logger.info(
            "no model= given: plans have one head group and assume 4 q heads per kv head; they fit "
            "any layer. Pass model= (a Transformers config, or AttentionShape(q_heads, kv_heads, "
            "head_dim, dtype)) for exact prices"
        )


def _dtype_of(model: Any) -> str | None:
    """The dtype that a model's weights or its config have, by our name."""
    of = model.get if isinstance(model, Mapping) else partial(getattr, model)
    found = of("dtype", None) or of("torch_dtype", None)
    if found is None and hasattr(model, "parameters"):
        found = next((weight.dtype for weight in model.parameters()), None)
    return dtype_name(found)
