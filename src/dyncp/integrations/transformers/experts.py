"""The auxiliary loss of mixtures of experts, over the tokens of all ranks.

With f_e the share of choices that expert e got and p_e its mean probability, over all tokens and
layers, the loss is num_experts * sum_e(f_e * p_e). A product of means is no mean of products: ranks
add up f, which has no gradients, and each takes its own tokens' part of p. Their sum is the loss of
the batch, once.
"""

from typing import Any

import torch
from torch import Tensor

from dyncp.executor import Step

COEFFICIENT = "router_aux_loss_coef"


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
