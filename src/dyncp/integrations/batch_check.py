"""Whether local data belong to a step."""

import torch
from torch import Tensor

from dyncp.dataloader.local_fields import fingerprint_tensor
from dyncp.executor import Step


def check_batch(step: Step, positions: Tensor, batch: Tensor | None) -> None:
    """Raises ValueError where `positions` [1, rows] and the fingerprint `batch` (None: unknown) of
    local data are not those of the step."""
    if batch is not None:
        own = fingerprint_tensor(step.fingerprint)
        if batch.is_cuda:  # not waited for
            torch._assert_async((batch == own.to(batch.device, non_blocking=True)).all())
        elif not torch.equal(batch, own):
            raise ValueError(
                "local data and step are of different batches: the loader gives them together, as "
                "(local_data, plan); prepare that plan"
            )
    if positions.shape[1] != step.num_rows:
        raise ValueError(
            f"local data have {positions.shape[1]} rows and the step's plan {step.num_rows}: they "
            "are of different batches, or not this rank's"
        )
