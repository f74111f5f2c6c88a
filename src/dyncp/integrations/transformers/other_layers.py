"""Layers other than attention: those that mix tokens by state (convolutions, linear attention), and
mixtures of experts.

Mixers run document by document. Transformers gives them one row of tokens without document borders
(unless a kernel takes these). Here a layer's own forward runs on batches of documents of similar
length, padded at the end: a causal layer does not see the padding.

The auxiliary loss of experts is over the tokens of all ranks. With f_e the share of choices that
expert e got and p_e its mean probability, over all tokens and layers, the loss is num_experts *
sum_e(f_e * p_e). A product of means is no mean of products: ranks add up f, which has no gradients,
and each takes its own tokens' part of p. Their sum is the loss of the batch, once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from dyncp.executor import Step
from dyncp.integrations.transformers.functions import Call
from dyncp.integrations.transformers.layers import MIXERS

COEFFICIENT = "router_aux_loss_coef"


class Mixers:
    """The layers of a model that mix tokens by state; `detach` gives them back their forwards."""

    def __init__(self, model: Any, config: Any) -> None:
        self._modules = []
        for number, kind in enumerate(getattr(config, "layer_types", None) or ()):
            mixer = MIXERS.get((config.model_type, kind))
            if mixer is not None:
                module = _module_of(model, mixer.module, number)
                halo = None if mixer.kernel is None else getattr(config, mixer.kernel) - 1
                module.forward = partial(_mix, module.forward, number, halo)
                self._modules.append(module)

    def detach(self) -> None:
        for module in self._modules:
            del module.forward  # the instance's; that of its class is there again


def _module_of(model: Any, name: str, number: int) -> Any:
    """The module that a decoder layer has under this name."""
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
    """The layer's result for [1, rows, width]; rows after the step's are padding."""
    if not isinstance(dyncp_step, Call):
        raise ValueError(
            "an attached model was called without its step: call model(**local_data, "
            "dyncp_step=step) on the model that attach got; for generation, "
            "attached.detach() gives it back its own layers"
        )
    assert attention_mask is None, "plans have the masks"
    dyncp_step.seen.add(number)
    step, rows = dyncp_step.step, dyncp_step.step.num_rows
    x = hidden_states[0, :rows]
    if halo is None:
        mixed = _by_piece(forward, step.to_contiguous(x), step.contiguous.lengths)
        y = step.from_contiguous(mixed)
    else:
        mixed = _by_piece(forward, step.add_halo(x, halo), step.halo(halo).lengths)
        y = step.drop_halo(mixed, halo)
    return pad(y, (0, 0, 0, hidden_states.shape[1] - rows))[None]


def _by_piece(forward: Callable[..., Tensor], x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Runs every piece alone. A rank without rows runs one that it drops: its weights have to take
    part, as on the other ranks."""
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
    """Of ascending lengths: as many as are at most twice as long as the shortest."""
    groups, first = [], 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or lengths[i] > 2 * lengths[first]:
            groups.append(range(first, i))
            first = i
    return groups


def auxiliary_share(logits: tuple[Tensor, ...], chosen: int, step: Step, like: Tensor) -> Tensor:
    """This rank's share of the loss; `logits` are [rows, experts] of every layer, `like` [1, rows].

    Each token chooses `chosen` experts in each layer."""
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
    """The factor of the loss, which the model itself then adds no more."""
    coefficient = float(getattr(model, COEFFICIENT, 0.0))
    if hasattr(model, COEFFICIENT):
        setattr(model, COEFFICIENT, 0.0)
    return coefficient


def install_recorders(model: Any) -> None:
    """Hooks that give router logits. Transformers installs them in the first call that asks for
    these, behind a lock that torch.compile cannot enter."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    if hasattr(model, COEFFICIENT):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                maybe_install_capturing_hooks(module)
