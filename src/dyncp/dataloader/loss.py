"""Losses under context parallelism.

A rank's loss is the sum over its own targets divided by `num_items_in_batch`, the targets of the
whole optimiser step. The loss of the step is the sum over ranks, and so are the gradients.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def undo_gradient_average(loss: Tensor, group: Any = None) -> Tensor:
    """The loss to call backward on where a wrapper (DDP, FSDP) averages gradients over `group`.

    Averaging divides the sum over ranks by their number; this multiplies by it beforehand. Without
    an initialised process group it is the loss itself.
    """
    return loss * dist.get_world_size(group) if dist.is_initialized() else loss
