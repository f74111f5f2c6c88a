"""What Transformers' layers call: the attention and the mask function, and operators over all ranks
of a step that torch.compile does not look into."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import custom_op

from dyncp.executor import Step, attention
from dyncp.executor.step import step_of
from dyncp.integrations.frameworks import check_batch, check_one_row
from dyncp.integrations.transformers.layers import LayerMask

NAME = "dyncp"  # of both functions in Transformers' interfaces
# Keywords that reach the layers and change nothing in attention.
HARMLESS = frozenset({
    "cache_position", "is_causal", "labels", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids",
    "return_dict", "shift_labels", "use_cache",
})  # fmt: skip


class Call:
    """One forward of an attached model; what its layers get as `dyncp_step`."""

    def __init__(
        self,
        step: Step,
        layers: tuple[LayerMask, ...],
        rows: int,
        extra: int,
        listed: Mapping[str, Tensor],
    ) -> None:
        self.step, self.layers = step, layers
        self.listed = listed  # targets of tokens that have several, and the number of all
        self.rows, self.extra = rows, extra  # those of local data, and those added to them
        self.seen: set[int] = set()  # layers that have called


def mask_marker(
    *, attention_mask: Tensor | None = None, local_size: int | None = None, **options: Any
) -> str:
    """In place of a mask: what the model wants the layer to see. Plans have the real masks."""
    if attention_mask is not None:
        raise ValueError(
            "the model got an attention_mask; plans have the masks, and the loader leaves padding "
            "out: call model(**local_data, dyncp_step=step)"
        )
    if options.get("use_vmap") or "allow_is_bidirectional_skip" in options:
        raise ValueError(
            "the model asks for a mask that is neither causal nor a window or chunk of it; dyncp "
            "cannot tell which one"
        )
    return _marker(local_size)


def _marker(size: int | None) -> str:
    return f"{NAME} {size}"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    dyncp_step: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as Transformers calls it: q, k and v are [1, heads, rows, dim]."""
    if not isinstance(dyncp_step, Call):
        raise ValueError(
            f"{type(module).__name__} got no step: call model(**local_data, dyncp_step=step) on "
            "the model that attach got. Layers that do not hand keywords on, and wrappers that "
            "call model.forward past its hooks, cannot run under dyncp; for generation, "
            "attached.detach() gives the model back its own attention"
        )
    layer = _layer_of(module, dyncp_step, attention_mask, others)
    _check_options(module, query, dropout, others)
    dtype = _dtype_of(query, value)
    q, k, v = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
    step = dyncp_step.step
    out = attention(step, q, k, v, mask=layer.name, scale=scaling, sink=s_aux, padded=True)
    return out.unsqueeze(0), None


def _layer_of(module: Any, call: Call, marker: Any, others: dict[str, Any]) -> LayerMask:
    """The layer's mask, if config, layer and the mask that the model made agree about it."""
    number = getattr(module, "layer_idx", None)
    if number is None or not 0 <= number < len(call.layers):
        raise ValueError(
            f"{type(module).__name__} has layer_idx {number}; the config has {len(call.layers)} "
            "attention layers"
        )
    layer: LayerMask = call.layers[number]
    window = others.pop("sliding_window", None)
    if marker != _marker(layer.size) or (window is not None and window != layer.size):
        raise ValueError(
            f"layer {number} ({type(module).__name__}) was given mask {marker!r} and window "
            f"{window}; by the config its size is {layer.size}"
        )
    compiling = torch.compiler.is_dynamo_compiling()  # the operator will say it when it runs
    if not compiling and layer.name not in call.step.plan.masks:
        raise ValueError(
            f"layer {number} needs mask {layer.name!r}, and the plan has "
            f"{', '.join(call.step.plan.masks)}; make the loader by attached.loader(dataset, "
            "mask_fn), or give it attached.masks(mask_fn)"
        )
    call.seen.add(number)
    return layer


def _check_options(module: Any, query: Tensor, dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout} in training; dyncp has none: set it to 0 in the "
            "config (attention_dropout, attn_pdrop) before the model is made"
        )
    unknown = [
        name
        for name, given in others.items()
        if name not in HARMLESS and given is not None and given is not False
    ]
    is_causal = others.get("is_causal")
    if unknown or (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise ValueError(
            f"{type(module).__name__} gives attention {', '.join(unknown) or 'is_causal=False'}, "
            "which dyncp does not have; results would be wrong without it"
        )
    check_one_row(query.shape[0])


def _dtype_of(query: Tensor, value: Tensor) -> torch.dtype:
    """The dtype of q, k and v: RoPE and norms may leave q and k wider than v."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return value.dtype


@custom_op("dyncp::enter", mutates_args=())
def enter(
    number: Tensor, positions: Tensor, batch: Tensor | None, extra: int, largest: bool
) -> Tensor:
    """Positions [1, rows + extra] of local data that belong to the step: `extra` rows are at the
    end, with position 0, or the `largest` of all ranks."""
    step = step_of(number)
    check_batch(step, positions, batch)
    if not extra:
        return positions.clone()
    fill = positions.new_zeros(1, extra)
    if largest:
        fill += _all_ranks(step, positions.amax(1) if positions.numel() else fill[0, :1]).amax()
    return torch.cat([positions, fill], dim=1)


@enter.register_fake
def _(
    number: Tensor,  # noqa: ARG001
    positions: Tensor,
    batch: Tensor | None,  # noqa: ARG001
    extra: int,
    largest: bool,  # noqa: ARG001
) -> Tensor:
    return positions.new_empty(1, positions.shape[1] + extra)


@custom_op("dyncp::token_shares", mutates_args=())
def token_shares(number: Tensor, like: Tensor) -> Tensor:
    """Each row's share of all tokens of the batch, fp32[rows]: 0 for rows that only pad."""
    step = step_of(number)
    shares = torch.zeros(like.shape[1], dtype=torch.float32)
    rows = np.concatenate([part.row_coordinates for part in step.parts])
    shares[: len(rows)] = torch.from_numpy(rows >= 0) / float(step.plan.lengths.sum())
    return shares.to(like.device, non_blocking=True)


@token_shares.register_fake
def _(number: Tensor, like: Tensor) -> Tensor:  # noqa: ARG001
    return like.new_empty(like.shape[1], dtype=torch.float32)


@custom_op("dyncp::sum_of_ranks", mutates_args=())
def sum_of_ranks(number: Tensor, counts: Tensor) -> Tensor:
    """The sum over the ranks of the step, without gradients."""
    return _all_ranks(step_of(number), counts).sum(dim=0)


@sum_of_ranks.register_fake
def _(number: Tensor, counts: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(counts)


def _all_ranks(step: Step, numbers: Tensor) -> Tensor:
    """[ranks, ...]; a process that drives all ranks has their sum already."""
    if len(step.parts) == step.plan.num_ranks:
        return numbers.detach().clone()[None]
    return torch.cat(step.transport.gather(numbers.detach()[None], [1] * step.plan.num_ranks))
