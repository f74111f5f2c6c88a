"""What `model=` may be: a shape, sizes, a Transformers config, or a model that has one."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dyncp.blocks import AttentionShape
from dyncp.cost import ModelConfig, from_transformers_config

logger = logging.getLogger(__name__)

DTYPE_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def shape_of(model: Any, dtype: str | None = None) -> tuple[AttentionShape, ModelConfig | None]:
    """The attention shape of `model`, and its sizes where they are known.

    `dtype` is that of q and kv ("bf16", ...); by default what the model or its config says.
    """
    if model is None:
        return AttentionShape.assumed(), None
    if isinstance(model, AttentionShape):
        return (replace(model, dtype=dtype) if dtype else model), None
    if isinstance(model, ModelConfig):
        return model.attention_shape(dtype or "bf16"), model
    config = getattr(model, "config", model)  # a Transformers model, or a config
    chosen = dtype or _dtype_of(model) or _dtype_of(config) or "bf16"
    if hasattr(config, "attention_shape"):
        return config.attention_shape(chosen), None
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        sizes = from_transformers_config(config)
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
    found = next((getattr(model, name, None) for name in ("dtype", "torch_dtype")), None)
    if isinstance(model, Mapping):
        found = model.get("dtype") or model.get("torch_dtype")
    if found is None and hasattr(model, "parameters"):
        found = next((weight.dtype for weight in model.parameters()), None)
    return DTYPE_NAMES.get(str(found).removeprefix("torch."))
