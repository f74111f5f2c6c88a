"""What a model asks of all ranks of a step, as operators that torch.compile does not look into."""

import numpy as np
import torch
from torch import Tensor
from torch.library import custom_op

from dyncp.executor.numbers import step_of
from dyncp.executor.step import Step
from dyncp.integrations.batch_check import check_batch


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
