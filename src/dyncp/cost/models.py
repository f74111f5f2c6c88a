"""Sizes of known models by name."""

from pathlib import Path

from dyncp.blocks import AttentionShape
from dyncp.cost.model import ModelConfig

LLAMA, QWEN = 128_256, 151_936  # vocabularies
MODELS = {
    "llama3_8b": ModelConfig(4096, 32, 14336, LLAMA, 32, 8, 128),
    "llama3_70b": ModelConfig(8192, 80, 28672, LLAMA, 64, 8, 128),
    "llama3_405b": ModelConfig(16384, 126, 53248, LLAMA, 128, 8, 128),
    "llama3_2_1b": ModelConfig(2048, 16, 8192, LLAMA, 32, 8, 64),
    "llama3_2_3b": ModelConfig(3072, 28, 8192, LLAMA, 24, 8, 128),
    "mistral_7b": ModelConfig(4096, 32, 14336, 32_768, 32, 8, 128),
    "qwen3_0_6b": ModelConfig(1024, 28, 3072, QWEN, 16, 8, 128),
    "qwen3_1_7b": ModelConfig(2048, 28, 6144, QWEN, 16, 8, 128),
    "qwen3_4b": ModelConfig(2560, 36, 9728, QWEN, 32, 8, 128),
    "qwen3_8b": ModelConfig(4096, 36, 12288, QWEN, 32, 8, 128),
    "qwen3_14b": ModelConfig(5120, 40, 17408, QWEN, 40, 8, 128),
    "qwen3_32b": ModelConfig(5120, 64, 25600, QWEN, 64, 8, 128),
    # 8 of 128 experts of 768 per token.
    "qwen3_30b_a3b": ModelConfig(2048, 48, 8 * 768, QWEN, 32, 4, 128, experts=128),
    # The model of the DCP paper's end-to-end experiments.
    "gpt_8b": ModelConfig(4096, 32, 14336, 50_257, 32, 8, 128),
}


# A decoder of unknown sizes is assumed to be like Llama-3-8B; FFN and vocabulary in hidden sizes.
LAYERS, FFN, VOCAB = 32, 3.5, 32


def usual_decoder(shape: AttentionShape) -> ModelConfig:
    """A decoder with the heads of `shape`, otherwise like Llama-3-8B."""
    hidden = shape.q_heads * shape.head_dim
    sizes = (hidden, LAYERS, round(FFN * hidden), VOCAB * hidden)
    heads = shape.q_heads, shape.kv_heads, shape.head_dim
    return ModelConfig(*sizes, *heads, dtype=shape.dtype)


def find_model(name: str) -> ModelConfig:
    """A known model, in any spelling ("llama3_8b", "Llama3-8B"), or the sizes in a config.json,
    given as its path or its folder."""
    written = name.lower().replace("-", "_").replace(".", "_")
    if written in MODELS:
        return MODELS[written]
    if name.endswith(".json") or Path(name).is_dir():
        return ModelConfig.of(name)
    raise ValueError(
        f"model is {name!r}; choose one of {', '.join(MODELS)}, or give a config.json or its folder"
    )
