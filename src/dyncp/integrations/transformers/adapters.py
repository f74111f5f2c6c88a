"""Models that PEFT wraps, for `attach`. Nothing of PEFT is imported."""

from typing import Any


def without_adapters(model: Any) -> tuple[Any, Any]:
    """The Transformers model inside a PeftModel, and PEFT's module that calls it; twice the model
    itself if PEFT does not wrap it."""
    configs = getattr(model, "peft_config", None)
    if configs is None or not hasattr(model, "get_base_model"):
        return model, model
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"adapter {name!r} of {type(model).__name__} is {config.peft_type.value}, which "
                "puts tokens of its own before the batch; ranks hold parts of sequences. Use "
                "adapters of layers, such as LoRA"
            )
    return model.get_base_model(), model.base_model
