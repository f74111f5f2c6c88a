"""A tiny Llama of Megatron-Core, with Megatron's own attention or dyncp's."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from framework_cases import VOCAB

HEADS, KV_HEADS = 4, 2


def config_of(**options: Any) -> TransformerConfig:
    """A small config without fusions, which need GPUs."""
    return TransformerConfig(**{
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": HEADS,
        "num_query_groups": KV_HEADS, "ffn_hidden_size": 64, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": nn.functional.silu, "add_bias_linear": False,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True,
        "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "apply_rope_fusion": False,
        "persist_layer_norm": False, "init_method_std": 0.2,
        **options,
    })  # fmt: skip


def layer_spec() -> Any:
    return get_gpt_layer_local_spec(normalization="RMSNorm")


def tiny_gpt(spec: Any, **options: Any) -> Any:
    """The same weights every time; Megatron divides them over tensor-parallel ranks."""
    torch.manual_seed(0)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    model = GPTModel(
        config_of(tensor_model_parallel_size=tp, **options.pop("config", {})),
        spec, VOCAB, 512, position_embedding_type=options.pop("positions", "rope"), **options,
    )  # fmt: skip
    return model.float()


class DenseAttention(nn.Module):
    """Causal attention by torch, for a single document."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        sdpa = nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)
