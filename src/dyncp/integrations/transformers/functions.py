"""The functions that the layers of an attached Transformers model run: attention, mixers (layers
with state: convolutions, linear attention) and the auxiliary loss of mixtures of experts. Also the
operators over all ranks of a step, which are opaque to torch.compile.

Mixers run document by document. Transformers would give them one row of tokens without document
borders (unless a kernel takes these). Here a layer's own forward runs on batches of documents of
similar length, padded at the end. The layer is causal, so padding does not change its results.

The auxiliary loss of experts covers the tokens of all ranks. Let f_e be the share of choices that
expert e got, and p_e its mean probability, over all tokens and layers. The loss is num_experts *
sum_e(f_e * p_e). A product of means is not a mean of products, so ranks first sum f, which has no
gradients. Each rank then uses its own tokens' part of p, and the sum over ranks is the loss of the
batch.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.library import custom_op
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from dyncp.executor import Step, attention
from dyncp.executor.step import step_of
from dyncp.integrations import check_batch, check_one_row
from dyncp.integrations.transformers.layers import MIXERS, LayerMask

logger = logging.getLogger(__name__)

NAME = "dyncp"  # of the attention function and the mask function in Transformers' interfaces
COEFFICIENT = "router_aux_loss_coef"
# Keywords that reach the layers and have no effect on attention.
HARMLESS = frozenset({
    "cache_position", "is_causal", "labels", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids",
    "return_dict", "shift_labels", "use_cache",
})  # fmt: skip

LEARNS_IN_EVAL = (
    "a model in eval mode was called with a training plan and gradients: its dropout is off and "
    "activation checkpointing does nothing. from_pretrained returns models in eval mode: call "
    "model.train() before training. For evaluation, use torch.no_grad() and a loader with "
    "evaluation=True"
)
DROPS_IN_EVALUATION = (
    "a model in train mode was called with a plan for evaluation: its dropout is on; call "
    "model.eval() before evaluation, and model.train() after it"
)


class Call:
    """One forward of an attached model; passed to its layers as `dyncp_step`."""

    def __init__(
        self,
        step: Step,
        layers: tuple[LayerMask, ...],
        rows: int,
        extra: int,
        listed: Mapping[str, Tensor],
        begun: Any = None,
    ) -> None:
        self.step, self.layers = step, layers
        self.begun = begun  # the module whose forward began it: the model, or one around it
        self.listed = listed  # target fields, if tokens have several targets
        self.rows, self.extra = rows, extra  # rows of the local data, and rows added to them
        self.seen: set[int] = set()  # layers that have called dyncp


def _call_of(layer: str, given: Any) -> Call:
    """The `dyncp_step` argument of a layer; ValueError if it got none."""
    if not isinstance(given, Call):
        raise ValueError(
            f"{layer} got no step: call model(**local_data, dyncp_step=step) on the model that "
            "was given to attach. Layers that do not pass keywords on, and wrappers that call "
            "model.forward directly and so bypass its hooks, cannot run under dyncp. For calls "
            "with the model's own attention, first call attached.detach()"
        )
    return given


def mask_marker(
    *, attention_mask: Tensor | None = None, local_size: int | None = None, **options: Any
) -> str:
    """A text that replaces the mask that Transformers would make. It says which window or chunk
    size the model wants for the layer; the masks themselves are part of the plan."""
    if attention_mask is not None:
        raise ValueError(
            "the model's code makes an attention_mask of its own, or passes one on, for the rows "
            "of one rank in their order, which are not whole sequences; masks are part of the "
            "plan, so dyncp cannot run it"
        )
    if options.get("use_vmap") or "allow_is_bidirectional_skip" in options:
        raise ValueError(
            "the model requests a mask that dyncp does not know: neither causal nor a window or "
            "chunk of it"
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
    """Attention of one layer, as Transformers calls it. q, k and v are `[1, heads, rows, dim]`; the
    result is `[1, rows, heads, dim]`."""
    call = _call_of(type(module).__name__, dyncp_step)
    layer = _layer_of(module, call, attention_mask, others)
    _check_options(module, query, dropout, others)
    if key.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"the keys of {type(module).__name__} have head_dim {key.shape[-1]} and its values "
            f"{value.shape[-1]} (multi-head latent attention, for example); dyncp's kernels need "
            "the same"
        )
    dtype = _dtype_of(query, value)
    q, k, v = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
    out = attention(call.step, q, k, v, mask=layer.name, scale=scaling, sink=s_aux, padded=True)
    return out.unsqueeze(0), None


def _layer_of(module: Any, call: Call, marker: Any, others: dict[str, Any]) -> LayerMask:
    """The layer's mask; ValueError if the config, the layer and the model's marker disagree."""
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
            f"{window}; according to the config its size is {layer.size}"
        )
    compiling = torch.compiler.is_dynamo_compiling()  # then the operator checks it when it runs
    if not compiling and layer.name not in call.step.plan.masks:
        raise ValueError(
            f"layer {number} needs mask {layer.name!r}, and the plan has "
            f"{', '.join(call.step.plan.masks)}; make the loader with attached.loader(dataset, "
            "mask_fn), or give it attached.masks(mask_fn)"
        )
    call.seen.add(number)
    return layer


def _check_options(module: Any, query: Tensor, dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout} in training, which dyncp does not support: set it to "
            "0 in the config (attention_dropout, attn_pdrop) before the model is made"
        )
    unknown = [
        name
        for name, given in others.items()
        if name not in HARMLESS and given is not None and given is not False
    ]
    is_causal = others.get("is_causal")
    if unknown or (getattr(module, "is_causal", True) if is_causal is None else is_causal) is False:
        raise ValueError(
            f"{type(module).__name__} calls attention with "
            f"{', '.join(unknown) or 'is_causal=False'}, which dyncp does not support; results "
            "would be wrong without it"
        )
    check_one_row(query.shape[0])


def _dtype_of(query: Tensor, value: Tensor) -> torch.dtype:
    """The common dtype of q, k and v: autocast's (which leaves fp64 alone), or that of v. RoPE and
    norms may return q and k in a wider one."""
    device = query.device.type
    if torch.is_autocast_enabled(device) and value.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return value.dtype


def install_mixers(model: Any, config: Any) -> list[Any]:
    """Replaces the forward of the model's mixers, and returns their modules."""
    modules = []
    for number, kind in enumerate(getattr(config, "layer_types", None) or ()):
        mixer = MIXERS.get((config.model_type, kind))
        if mixer is not None:
            module = _module_of(model, mixer.module, number)
            halo = None if mixer.kernel is None else getattr(config, mixer.kernel) - 1
            module.forward = partial(_mix, module.forward, number, halo)
            modules.append(module)
    return modules


def _module_of(model: Any, name: str, number: int) -> Any:
    """The module with this name in decoder layer `number`."""
    for layer in model.modules():
        module = getattr(layer, name, None)
        if getattr(module, "layer_idx", None) == number:
            return module
    raise ValueError(f"layer {number} of {type(model).__name__} has no module {name!r}")


@_disable_dynamo
def _mix(
    forward: Callable[..., Tensor],
    number: int,
    halo: int | None,
    hidden_states: Tensor,
    dyncp_step: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The layer's result for `[1, rows, width]`. Rows beyond those of the step are padding."""
    call = _call_of(f"layer {number}", dyncp_step)
    assert attention_mask is None, "plans have the masks"
    call.seen.add(number)
    step, rows = call.step, call.step.num_rows
    x = hidden_states[0, :rows]
    if halo is None:
        mixed = _by_piece(forward, step.to_contiguous(x), step.contiguous.lengths)
        y = step.from_contiguous(mixed)
    else:
        mixed = _by_piece(forward, step.add_halo(x, halo), step.halo(halo).lengths)
        y = step.drop_halo(mixed, halo)
    return pad(y, (0, 0, 0, hidden_states.shape[1] - rows))[None]


def _by_piece(forward: Callable[..., Tensor], x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Runs the layer on every piece separately. A rank without rows runs it on one row and drops
    the result, so that the layer's weights are used on every rank."""
    if not lengths:
        return forward(hidden_states=x.new_zeros(1, 1, x.shape[1]))[0, :0] + x
    pieces = x.split_with_sizes(lengths)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    results: list[Tensor] = [x] * len(lengths)
    for group in _groups([lengths[i] for i in order]):
        chosen = [order[i] for i in group]
        padded = pad_sequence([pieces[i] for i in chosen], batch_first=True)
        for i, result in zip(chosen, forward(hidden_states=padded), strict=True):
            results[i] = result[: lengths[i]]
    return torch.cat(results)


def _groups(lengths: Sequence[int]) -> list[range]:
    """Splits ascending lengths into groups whose longest is at most twice the shortest."""
    groups, first = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or lengths[i] > 2 * lengths[first]:
            groups.append(range(first, i))
            first = i
    return groups


def auxiliary_share(logits: tuple[Tensor, ...], chosen: int, step: Step, like: Tensor) -> Tensor:
    """This rank's share of the auxiliary loss. `logits` holds `[rows, experts]` of every layer, and
    `like` is any tensor `[1, rows]`. Each token chooses `chosen` experts in each layer."""
    shares = torch.ops.dyncp.token_shares(step.number, like) / len(logits)
    device, experts = logits[0].device, logits[0].shape[-1]
    choices = torch.zeros(experts, device=device)
    probability = torch.zeros(experts, device=device)
    for of_layer in logits:
        routing = of_layer.to(device).float().softmax(dim=-1)
        best = routing.topk(chosen, dim=-1).indices
        choices = choices.index_add(0, best.flatten(), shares.repeat_interleave(chosen))
        probability = probability + shares @ routing
    everywhere = torch.ops.dyncp.sum_of_ranks(step.number, choices.detach())
    share: Tensor = experts * (everywhere * probability).sum()
    return share


def take_coefficient(model: Any) -> float:
    """Returns the model's coefficient of the auxiliary loss (0 if it has none), and sets it to 0 so
    that the model does not add the loss itself."""
    coefficient = float(getattr(model, COEFFICIENT, 0.0))
    if hasattr(model, COEFFICIENT):
        setattr(model, COEFFICIENT, 0.0)
    return coefficient


def install_recorders(model: Any) -> None:
    """Installs the hooks that record router logits. Transformers would install them in the first
    call that requests the logits, under a lock that torch.compile cannot trace."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if hasattr(model, COEFFICIENT):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                maybe_install_capturing_hooks(module)


@custom_op("dyncp::enter", mutates_args=())
def enter(
    number: Tensor,
    positions: Tensor,
    batch: Tensor | None,
    extra: int,
    largest: bool,
    learns_in_eval: bool,
    drops: bool,
) -> Tensor:
    """Positions `[1, rows + extra]`, after a check that the local data belong to the step. The
    `extra` rows at the end have position 0 or, if `largest`, the largest position of all ranks.
    `learns_in_eval`: gradients are enabled, and the model is in eval mode. `drops`: dropout is on.
    """
    step = step_of(number)
    check_batch(step, positions, batch)
    trains = any(mask.backward is not None for mask in step.plan.masks.values())
    if trains and learns_in_eval:
        warn_once(LEARNS_IN_EVAL)
    if not trains and drops:
        warn_once(DROPS_IN_EVALUATION)
    if not extra:
        return positions.clone()
    fill = positions.new_zeros(1, extra)
    if largest:
        fill += _all_ranks(step, positions.amax(1) if positions.numel() else fill[0, :1]).amax()
    return torch.cat([positions, fill], dim=1)


@cache
def warn_once(message: str) -> None:
    logger.warning(message)


@enter.register_fake
def _(number: Tensor, positions: Tensor, batch: Any, extra: int, *_: Any) -> Tensor:  # noqa: ARG001
    return positions.new_empty(1, positions.shape[1] + extra)


@custom_op("dyncp::token_shares", mutates_args=())
def token_shares(number: Tensor, like: Tensor) -> Tensor:
    """Each row's share of the batch's tokens, `fp32[rows]`: 1 / tokens, or 0 for padding rows."""
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
    """The tensors of all ranks, `[ranks, ...]`. With virtual ranks the one process already has the
    total, and the result is `[1, ...]`."""
    if len(step.parts) == step.plan.num_ranks:
        return numbers.detach().clone()[None]
    return torch.cat(step.transport.gather(numbers.detach()[None], [1] * step.plan.num_ranks))
