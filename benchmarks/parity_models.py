"""Tiny random models of every architecture that `dyncp.integrations.transformers` runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

VOCABULARY, POSITIONS, WINDOW = 97, 2048, 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LOCAL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "output_router_logits": True,
    # The norm after linear attention divides by tiny numbers in a model of this size: with 1e-6,
    # weights that differ by 1e-7 give losses that differ by 1e-3 after 15 steps.
    "rms_norm_eps": 0.05,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def config_of(name: str, **options: Any) -> Any:
    """The config of a tiny model; `options` override its fields."""
    import transformers as hf

    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", {}),
        "llama dynamic rope": (
            "LlamaConfig",
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            },
        ),
        "qwen3": ("Qwen3Config", {"head_dim": 8}),
        "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, "output_router_logits": True} | EXPERTS),
        "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
        "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "query_pre_attn_scalar": 12} | LOCAL),
        "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
        "phi3": ("Phi3Config", {}),
        "phi3 longrope": (
            "Phi3Config",
            {
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0, 1.5, 2.0, 3.0],
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        "olmo2": ("Olmo2Config", {}),
        "olmo3": ("Olmo3Config", LOCAL),
        "gpt2": ("GPT2Config", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        "granite": ("GraniteConfig", {"attention_multiplier": 0.2, "residual_multiplier": 0.5}),
        "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
        "cohere2": ("Cohere2Config", {"head_dim": 8} | LOCAL),
        "opt": ("OPTConfig", {"dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        "lfm2": (
            "Lfm2Config",
            {"layer_types": ["conv", "full_attention"], "conv_bias": True, "conv_L_cache": 4},
        ),
        "qwen3_next": (
            "Qwen3NextConfig",
            LINEAR | EXPERTS | {"shared_expert_intermediate_size": 16},
        ),
        "gpt_oss": (
            "GptOssConfig",
            {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2} | LOCAL,
        ),
    }
    kind, own = kinds[name]
    sizes = dict(SIZES)
    if name == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
        sizes["n_positions"] = POSITIONS
    if name == "opt":
        sizes["num_key_value_heads"] = 4
    return getattr(hf, kind)(**sizes | own | options)


NAMES = (
    "llama", "llama dynamic rope", "qwen3", "qwen3_moe", "mistral", "gemma3", "gpt_neox", "phi3",
    "phi3 longrope", "olmo2", "olmo3", "gpt2", "granite", "smollm3", "cohere2", "opt", "gpt_oss",
    "lfm2", "qwen3_next",
)  # fmt: skip


def make_model(name: str, seed: int = 0, **options: Any) -> Any:
    """A model with random weights, in fp32; the same on all ranks."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name, **options), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # also sinks and biases; attention matters
            parameter.add_(torch.randn(parameter.shape) * 0.15)
    return model


def documents(count: int, seed: int = 0, longest: int = 300) -> list[dict[str, torch.Tensor]]:
    """Documents of long-tailed lengths: most are short, a few are long."""
    random = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(count, generator=random) ** 4 * longest + 3).long().tolist()
    lengths[::5] = [longest - 7 * i for i in range(len(lengths[::5]))]
    return [{"input_ids": torch.randint(VOCABULARY, (n,), generator=random)} for n in lengths]


@contextmanager
def each_text_alone(model: Any, bias: Tensor, positions: Tensor) -> Iterator[None]:
    """Runs Transformers' convolutions and linear attention on one text at a time: in a row of
    several documents they would cross borders, and a branch does not directly follow its parent
    there.

    Masks (0 in `bias`) and positions define the text of a token: the token before it is the nearest
    one that it attends and whose position is one less."""
    modules = [
        module
        for layer in model.modules()
        for name in ("conv", "linear_attn")
        if hasattr(module := getattr(layer, name, None), "layer_idx")
    ]
    lines = _lines(bias[0, 0] == 0, positions[0]) if modules else []
    for module in modules:
        module.forward = partial(_each_line, module.forward, lines)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _lines(allowed: Tensor, positions: Tensor) -> list[list[int]]:
    """Every text from its beginning to a last token, one that no other token follows."""
    before = allowed.tril(-1) & (positions[None] == positions[:, None] - 1)
    nearest = [max(row.nonzero().flatten().tolist(), default=-1) for row in before]
    lines = []
    for token in sorted(set(range(len(nearest))) - set(nearest)):
        line = [token]
        while nearest[line[-1]] >= 0:
            line.append(nearest[line[-1]])
        lines.append(line[::-1])
    return lines


def _each_line(
    forward: Callable[..., Tensor], lines: list[list[int]], hidden_states: Tensor, **_: Any
) -> Tensor:
    result = torch.zeros_like(hidden_states)
    for line in lines:
        result[:, line] = forward(hidden_states=hidden_states[:, line])
    return result


Dense = Callable[[Any, Any], Any]
