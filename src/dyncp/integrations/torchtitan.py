"""torchtitan models under dyncp: `use_dyncp(config)`, then `model(**model_inputs(data, step))`.

torchtitan passes attention masks from the model down to every layer. Under dyncp the step is passed
in their place. To torchtitan, the ranks of a plan are data-parallel ranks: they hold different
tokens, FSDP sums their gradients, and the loss is divided by the targets of all of them. Its own
context parallelism stays off. Requires torchtitan, and patches nothing in it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

from dyncp.blocks import AttentionShape
from dyncp.checks import instance_of
from dyncp.dataloader import DCPDataLoader
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.integrations import (
    ROWS,
    check_batch,
    check_one_row,
    check_own_parallelism,
    check_rows,
    check_single_targets,
    checked_step,
    make_mesh,
)
from dyncp.plan import DEFAULT_MASK

CAUSAL = (-1, 0)  # the window_size of VarlenAttention that means no window


class PlannedAttention(Module):
    """Inner attention of a layer that calls dyncp, with the step that is passed as its masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        mask: str = DEFAULT_MASK  # the name of one of the plan's masks

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.mask = config.mask

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002
        **others: Any,
    ) -> Tensor:
        """q, k, v and the result are `[1, rows, heads, head_dim]`, with this rank's heads."""
        unknown = [name for name, given in others.items() if given is not None]
        if unknown:
            raise ValueError(
                f"the layer calls attention with {', '.join(unknown)}, which dyncp does not "
                "support; results would be wrong without it"
            )
        step = checked_step("attention_masks", attention_masks, Step)
        q, k, v = (x.squeeze(0) for x in (q_BLNH, k_BLNH, v_BLNH))
        return attention(step, q, k, v, mask=self.mask, scale=scale).unsqueeze(0)


class PlannedGQAttention(GQAttention):
    """GQAttention that refuses a call without the step or the positions of its rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(
        self, x_BLD: Tensor, attention_masks: Any, positions: Tensor | None = None
    ) -> Tensor:
        step = checked_step("attention_masks", attention_masks, Step)
        check_one_row(x_BLD.shape[0])
        if positions is None:
            raise ValueError(
                "the model got no positions: RoPE would use a token's row on its rank as its "
                "position; call model(**model_inputs(local_data, step))"
            )
        if not torch.compiler.is_compiling():  # a graph serves any number of rows
            check_rows(step, positions)
        out: Tensor = super().forward(x_BLD, attention_masks, positions)
        return out


def use_dyncp(config: Any, *, mask: str = DEFAULT_MASK) -> Any:
    """Puts dyncp's attention into the layers of a model config (Llama 3, Qwen 3), and returns it.

    Call it before the config is updated from a job config and built. `mask` is the name of a mask
    of the plan. Raises ValueError for layers that dyncp does not support: windows, sinks, latent
    and linear attention.
    """
    expected = "a torchtitan decoder's, such as llama3_configs['8B'](attn_backend='flex')"
    instance_of("config", config, Decoder.Config, expected)
    owner: Any = config._owner
    if owner.get_attention_masks is not Decoder.get_attention_masks:
        raise ValueError(
            f"{owner.__name__} makes its own masks (such as windows), which plans would not have; "
            "allowed are decoders whose layers attend whole documents"
        )
    layers = [_with_dyncp(number, layer, mask) for number, layer in enumerate(config.layers)]
    for layer, replaced in zip(config.layers, layers, strict=True):
        layer.attention = replaced
    return config


def _with_dyncp(number: int, layer: Any, mask: str) -> Any:
    found = layer.attention
    if layer.moe is not None and layer.moe.load_balance_coeff:
        raise ValueError(
            f"layer {number} balances its experts by row counts, which would include padding rows; "
            "set load_balance_coeff=None"
        )
    if type(found) is not GQAttention.Config:
        kind = "no attention" if found is None else type(found).__qualname__
        raise ValueError(
            f"layer {number} has {kind}; dyncp replaces only GQAttention: others (sinks, latent or "
            "linear attention) would silently give wrong results"
        )
    inner = found.inner_attention
    known = (FlexAttention.Config, ScaledDotProductAttention.Config, VarlenAttention.Config)
    window = getattr(inner, "window_size", CAUSAL)
    if not isinstance(inner, known) or tuple(window) != CAUSAL:
        raise ValueError(
            f"layer {number} has inner attention {type(inner).__qualname__} with window {window}; "
            "allowed are FlexAttention, VarlenAttention and ScaledDotProductAttention without a "
            "window. For a window, use a mask of the plan: masks.sliding_window"
        )
    kept = {entry.name: getattr(found, entry.name) for entry in fields(found)}
    kept["inner_attention"] = PlannedAttention.Config(mask=mask)
    return PlannedGQAttention.Config(**kept)


def attention_shape(config: Any, tp: int = 1, dtype: Any = "bf16") -> AttentionShape:
    """The attention shape of one rank's layers, for `DCPDataLoader(model=)`. The heads are divided
    among `tp` tensor-parallel ranks."""
    layer = config.first_attention
    kv_heads = layer.n_kv_heads or layer.n_heads
    head_dim = layer.head_dim or layer.dim // layer.n_heads
    return AttentionShape(layer.n_heads, kv_heads, head_dim, dtype).divided(tp)


def plan_mesh(parallel_dims: Any, cp: int | None = None) -> DeviceMesh:
    """The mesh (dp, cp, tp) for a loader and its executor.

    Groups of `cp` data-parallel ranks run a plan together (default: all of them); several groups
    are replicas. Raises ValueError if torchtitan's own context or pipeline parallelism is on.
    """
    check_own_parallelism(
        {
            "torchtitan's context_parallel_degree": parallel_dims.cp,
            "torchtitan's pipeline_parallel_degree": parallel_dims.pp,
        }
    )
    dp = parallel_dims.dp_replicate * parallel_dims.dp_shard
    return make_mesh(parallel_dims.world_mesh.device_type, dp, parallel_dims.tp, cp)


def model_inputs(local_data: Mapping[str, Tensor], step: Step) -> dict[str, Any]:
    """The arguments of the model. Raises ValueError if the local data and the step are of different
    batches."""
    positions = local_data["position_ids"]
    check_batch(step, positions, local_data.get("batch_fingerprint"))
    return {
        "tokens": local_data["input_ids"], "positions": positions, "attention_masks": step,
    }  # fmt: skip


class PlannedDataLoader(BaseDataLoader):
    """Gives dyncp's batches to torchtitan's trainer: `Trainer.Config(dataloader=Config(...))`.

    A batch contains its step as `attention_masks`, which the trainer passes to the model.
    `samples(tokenizer)` returns the dataset, and `mask_fn` the masks of its samples. `model` and
    `options` are arguments of DCPDataLoader. `cp` is the number of ranks that run a plan together.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        samples: Callable[[Any], Any]
        mask_fn: Any
        model: AttentionShape | None = None
        cp: int | None = None
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        **_: Any,
    ) -> None:
        from torchtitan.tools.utils import device_type

        peers = dist.get_world_size() // dp_world_size
        mesh = make_mesh(device_type, dp_world_size, peers, config.cp)
        if mesh["dp"].get_local_rank() * mesh["cp"].size() + mesh["cp"].get_local_rank() != dp_rank:
            raise ValueError(
                f"rank {dist.get_rank()} is data-parallel rank {dp_rank} of {dp_world_size}, which "
                "does not fit the order (dp, tp): turn off pipelines and torchtitan's own context "
                "parallelism"
            )
        self.executor = DCPExecutor(mesh)
        options: dict[str, Any] = {
            "group": mesh,
            "executor": self.executor,
            "model": config.model,
            "max_length": seq_len,
            "local_multiple": lcm(ROWS, peers),
        }
        dataset = config.samples(tokenizer)
        self.loader = DCPDataLoader(dataset, config.mask_fn, **options | config.options)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for local_data, plan in self.loader:
            check_single_targets(local_data, "write the loop")
            inputs = model_inputs(local_data, self.executor.prepare(plan))
            yield {"input": inputs.pop("tokens"), **inputs}, local_data["shift_labels"]

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
