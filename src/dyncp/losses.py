"""The loss of a model that predicts next tokens. A rank's loss is the sum over its own targets
divided by `num_items_in_batch`; the loss of the optimiser step is the sum over ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dyncp.gradients import watch_loss
from dyncp.samples import TARGET_FIELDS


def next_token_loss(logits: Tensor, local_data: Mapping[str, Tensor]) -> Tensor:
    """This rank's share of the loss: the sum over ranks is the weighted mean over all targets of
    the optimiser step.

    `logits` are [..., rows, vocabulary]; 16-bit logits are converted to fp32. Tokens with several
    targets (`masks.prefix_tree`) train on each of them.
    """
    if "target_rows" in local_data:
        losses = -target_log_probs(logits, local_data) * local_data["target_weights"].flatten()
    else:
        rows, label = _wide(logits.flatten(0, -2)), local_data["shift_labels"].flatten()
        losses = cross_entropy(rows, label, reduction="none")
    return watch_loss(losses.sum() / local_data["num_items_in_batch"])


def target_log_probs(logits: Tensor, local_data: Mapping[str, Tensor]) -> Tensor:
    """The log-probability of each target of this rank's rows, `[targets]`: of local data made with
    `list_targets=True`, or of a batch whose tokens have several targets."""
    if "target_rows" not in local_data:
        raise ValueError(
            "these local data do not list their targets; make them with make_local_data(..., "
            "list_targets=True)"
        )
    row, label = (local_data[name].flatten() for name in TARGET_FIELDS[:2])
    return -cross_entropy(_wide(logits.flatten(0, -2)[row]), label, reduction="none")


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
