"""The loss of a model that predicts next tokens. A rank's loss is the sum over its own targets
divided by `num_items_in_batch`; the loss of the optimiser step is the sum over ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dyncp.gradients import watch_loss
from dyncp.samples.local_data import TARGET_FIELDS


def next_token_loss(logits: Tensor, local_data: Mapping[str, Tensor]) -> Tensor:
    """This rank's share of the loss: the sum over ranks is the weighted mean over all targets of
    the optimiser step.

    `logits` are [..., rows, vocabulary]; 16-bit logits are converted to fp32. Tokens with several
    targets (`masks.prefix_tree`) train on each of them.
    """
    rows = logits.flatten(0, -2)
    wide = torch.promote_types(rows.dtype, torch.float32)
    if "target_rows" in local_data:
        row, label, weight = (local_data[name].flatten() for name in TARGET_FIELDS[:3])
        losses = cross_entropy(rows[row].to(wide), label, reduction="none") * weight
    else:
        label = local_data["shift_labels"].flatten()
        losses = cross_entropy(rows.to(wide), label, reduction="none")
    return watch_loss(losses.sum() / local_data["num_items_in_batch"])
