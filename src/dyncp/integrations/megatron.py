"""Megatron-Core's GPTModel under dyncp: `with_dyncp(spec)`, `attach(model)`, then
`model(**model_inputs(data, step))`.

Megatron passes `packed_seq_params` from the model down to every layer. Under dyncp they hold the
step and the positions of its rows. To Megatron, the ranks of a plan are data-parallel ranks, and
its own context parallelism stays off. Requires megatron-core, and patches nothing in it.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dyncp.blocks import AttentionShape
from dyncp.checks import instance_of
from dyncp.executor import Step, attention
from dyncp.integrations import (
    check_batch,
    check_one_row,
    check_own_parallelism,
    check_single_targets,
    checked_step,
    make_mesh,
)
from dyncp.samples import NO_TARGET

# Options of a TransformerConfig that dyncp does not support, and the values that turn them off.
REFUSED = {
    "attention_dropout": 0.0,
    "context_parallel_size": 1,
    "experimental_attention_variant": None,
    "fp8_dot_product_attention": False,
    "hybrid_context_parallel": False,
    "log_max_attention_logit": False,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "pipeline_model_parallel_size": 1,
    "qk_clip": False,
    "softmax_type": "vanilla",
    "window_size": None,
}
POSITIONS = ("rope", "learned_absolute", "none")


class StepParams(PackedSeqParams):
    """The step and the positions `[1, rows]` of its rows, in place of packed sequences."""

    def __init__(self, step: Step, positions: Tensor) -> None:
        self.step, self.positions = step, positions

    @property
    def max_seqlen_q(self) -> int:
        """Read only by Megatron's own RoPE, which would be wrong."""
        raise ValueError(
            "the model's RoPE counts rows, but a token's row on its rank is not its position; call "
            "attach(model) before training"
        )


class PlannedCoreAttention(MegatronModule):
    """Core attention of a layer that calls dyncp, with the step in `packed_seq_params`."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        attention_dropout: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        check_config(config)
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal or attention_dropout:
            raise ValueError(
                f"layer {layer_number} has {attention_type} attention with mask "
                f"{attn_mask_type.name} and dropout {attention_dropout}; dyncp supports causal "
                "self attention (with the plan's masks) without dropout"
            )
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,  # noqa: ARG002
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """q, k and v are `[rows, 1, heads, head_dim]`, with this rank's heads. Returns
        `[rows, 1, heads * head_dim]`."""
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                "the model got an attention mask or bias; masks are part of the plan, and biases "
                "are not supported: call model(**model_inputs(local_data, step))"
            )
        check_one_row(query.shape[1])
        step = checked_step("packed_seq_params", packed_seq_params, StepParams).step
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        return attention(step, q, k, v, scale=self.scale).flatten(1).unsqueeze(1)


class PositionRotary(nn.Module):
    """RoPE at the positions of the rows. Megatron's own counts rows, and needs a GPU."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(
        self,
        inference_context: Any,  # noqa: ARG002
        transformer: Any,  # noqa: ARG002
        transformer_input: Any,  # noqa: ARG002
        transformer_config: Any,  # noqa: ARG002
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """The argument that Megatron passes to `forward`: positions instead of a length."""
        given: StepParams = checked_step("packed_seq_params", packed_seq_params, StepParams)
        return given.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """The rotary angles, `[rows, 1, 1, dim]`."""
        frequencies = self.rotary.inv_freq.to(positions.device)
        place = positions.flatten().to(frequencies.dtype)
        if self.rotary.seq_len_interpolation_factor is not None:
            place = place / self.rotary.seq_len_interpolation_factor
        angles = torch.outer(place, frequencies)
        if self.rotary.rotary_interleaved:
            return angles.repeat_interleave(2, dim=-1)[:, None, None]
        return torch.cat([angles, angles], dim=-1)[:, None, None]


def with_dyncp(spec: Any) -> Any:
    """A copy of a layer spec with dyncp's core attention. Specs come from Megatron's
    `get_gpt_layer_local_spec` or `get_gpt_layer_with_transformer_engine_spec`."""
    spec = deepcopy(spec)
    layer: Any = getattr(spec.submodules, "self_attention", None)
    if getattr(layer, "module", None) is not SelfAttention:
        found = getattr(getattr(layer, "module", None), "__name__", "none")
        raise ValueError(
            f"the layer spec has self attention {found}; only SelfAttention is allowed: others "
            "(latent or linear attention) would silently give wrong results"
        )
    layer.submodules.core_attention = PlannedCoreAttention
    return spec


def attach(model: Any) -> Any:
    """Checks a GPTModel whose layers come from `with_dyncp`, makes its RoPE use positions instead
    of rows, and returns it."""
    instance_of("model", model, GPTModel, "Megatron-Core's GPTModel")
    for number, layer in enumerate(model.decoder.layers):
        found = layer.self_attention.core_attention
        if not isinstance(found, PlannedCoreAttention):
            raise ValueError(
                f"layer {number} has {type(found).__name__}, which attends only this rank's rows; "
                "build the model with with_dyncp(spec)"
            )
    kind = model.position_embedding_type
    if kind not in POSITIONS:
        raise ValueError(
            f"position_embedding_type is {kind!r}; allowed are {', '.join(POSITIONS)}: others use "
            "a token's row on its rank as its position"
        )
    if kind == "rope":
        model.rotary_pos_emb = PositionRotary(model.rotary_pos_emb)
    return model


def check_config(config: Any) -> None:
    """Raises ValueError for options that would give wrong results under dyncp."""
    for name, off in REFUSED.items():
        value = getattr(config, name, off)
        if value != off:
            raise ValueError(
                f"the TransformerConfig has {name}={value!r}, which does not work with dyncp; set "
                f"it to {off!r}"
            )
    if config.num_moe_experts and config.moe_aux_loss_coeff:
        raise ValueError(
            f"moe_aux_loss_coeff is {config.moe_aux_loss_coeff}: Megatron averages over each "
            "rank's own tokens, which is a different loss if ranks have different numbers of "
            "tokens; set it to 0"
        )


def attention_shape(config: Any, dtype: Any = None) -> AttentionShape:
    """The attention shape of one rank's layers, for `DCPDataLoader(model=)`."""
    kv_heads = config.num_query_groups or config.num_attention_heads
    heads = (config.num_attention_heads, kv_heads, config.kv_channels)
    shape = AttentionShape(*heads, config.params_dtype if dtype is None else dtype)
    return shape.divided(config.tensor_model_parallel_size)


def plan_mesh(cp: int | None = None) -> DeviceMesh:
    """The mesh (dp, cp, tp) for a loader and its executor. Groups of `cp`
    data-parallel ranks run a plan together (default: all of them). Call it after
    `initialize_model_parallel`."""
    check_own_parallelism(
        {
            "Megatron's context_parallel_size": parallel_state.get_context_parallel_world_size(),
            "Megatron's pipeline_model_parallel_size": (
                parallel_state.get_pipeline_model_parallel_world_size()
            ),
        }
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data_ranks = parallel_state.get_data_parallel_world_size()
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    mesh = make_mesh(device, data_ranks, tensor_group.size(), cp)
    if mesh["tp"].mesh.tolist() != dist.get_process_group_ranks(tensor_group):
        raise ValueError(
            f"Megatron's tensor-parallel ranks are {dist.get_process_group_ranks(tensor_group)}; "
            "expected adjacent ranks, as in its default order tp-cp-ep-dp-pp"
        )
    return mesh


def model_inputs(local_data: Mapping[str, Tensor], step: Step) -> dict[str, Any]:
    """The arguments of the model, which then returns the loss of each row, `[1, rows]`, for
    `loss_of`. Raises ValueError if the local data and the step are of different batches."""
    check_single_targets(local_data, "call the model without labels, and compute the loss")
    positions = local_data["position_ids"]
    check_batch(step, positions, local_data.get("batch_fingerprint"))
    return {
        "input_ids": local_data["input_ids"],
        "position_ids": positions,
        "attention_mask": None,
        "labels": local_data["shift_labels"].clamp_min(0),
        "packed_seq_params": StepParams(step, positions),
    }


def loss_of(losses: Tensor, local_data: Mapping[str, Tensor]) -> Tensor:
    """This rank's share of the step's loss, from the model's losses `[1, rows]`."""
    trained = local_data["shift_labels"] != NO_TARGET
    return losses.float()[trained].sum() / local_data["num_items_in_batch"]
