"""A tiny torchtitan Llama, with torchtitan's own attention or dyncp's."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

from framework_cases import VOCAB

DIM, HEADS, KV_HEADS = 32, 4, 2
WEIGHT = {"weight": partial(nn.init.trunc_normal_, std=0.2)}
ONES = {"weight": nn.init.ones_}


def tiny_llama(layers: int = 2, inner: Any = None) -> Any:
    """A config whose layers have torch's own attention, or `inner`."""
    inner = ScaledDotProductAttention.Config() if inner is None else inner

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=DIM, param_init=ONES)

    return Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=DIM, param_init=WEIGHT
        ),
        norm=norm(),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB, param_init=WEIGHT),
        layers=[
            Llama3TransformerBlock.Config(
                attention_norm=norm(),
                ffn_norm=norm(),
                attention=make_gqa_config(
                    dim=DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, fuse_qkv=True,
                    wqkv_param_init=WEIGHT, wo_param_init=WEIGHT, inner_attention=inner,
                    rope=ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=512),
                ),
                feed_forward=make_ffn_config(
                    dim=DIM, hidden_dim=64, w1_param_init=WEIGHT, w2w3_param_init=WEIGHT
                ),
            )
            for _ in range(layers)
        ],
    )  # fmt: skip


def built(config: Any) -> Any:
    """A model with the same weights every time."""
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_states()
    return model


def whole_loss(model: Any, documents: list[Tensor]) -> Tensor:
    """The mean loss over all targets, document by document, with torchtitan's own attention."""
    total = torch.zeros(())
    for tokens in documents:
        logits = model(tokens[None], positions=torch.arange(len(tokens))[None])[0, :-1]
        total = total + nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
    return total / sum(len(tokens) - 1 for tokens in documents)
