"""Per-token tensors between a batch that all ranks hold and each rank's own rows.

Gradients follow dyncp's convention: what is added up over ranks (`sum_gradients`) is the gradient.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dyncp.checks import instance_of
from dyncp.plan import gather_samples

if TYPE_CHECKING:
    from dyncp.executor.step import Step

LOSSES = ("replicated", "summed")


def shard(step: "Step", values: Tensor | Sequence[Tensor], fill: float) -> Tensor:
    whole = _concatenated(step, values)
    rows = np.concatenate([part.row_coordinates for part in step.parts])
    index = torch.from_numpy(rows).to(whole.device)
    taken = whole.index_select(0, index.clamp_min(0))
    if (rows >= 0).all():
        return taken
    return taken.masked_fill((index < 0).view(-1, *[1] * (taken.ndim - 1)), fill)


def _concatenated(step: "Step", values: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor with the tokens of all sequences of the batch."""
    lengths = step.plan.lengths.tolist()
    if isinstance(values, Tensor):
        if not values.ndim or len(values) != sum(lengths):
            raise ValueError(
                f"shard got shape {tuple(values.shape)}; the batch has {sum(lengths)} tokens: give "
                "[tokens, ...] of all its sequences, concatenated, or a list with one tensor each"
            )
        return values
    instance_of("what shard got", values, (list, tuple), "a tensor, or one per sequence")
    for value in values:
        instance_of("what shard got for a sequence", value, Tensor, "a torch tensor")
    found = [len(value) if value.ndim else 0 for value in values]
    if found != lengths:
        shown = f"{found[:8]}{' ...' if len(found) > 8 else ''}"
        raise ValueError(
            f"shard got sequences of {shown} tokens; those of the batch have {lengths[:8]}"
            f"{' ...' if len(lengths) > 8 else ''}"
        )
    return torch.cat(list(values))


def gather(step: "Step", rows: Tensor, loss: str | None) -> list[Tensor]:
    instance_of("what gather got", rows, Tensor, "a torch tensor")
    if not rows.ndim or len(rows) != step.num_rows:
        raise ValueError(
            f"gather got shape {tuple(rows.shape)}; this step has {step.num_rows} rows"
        )
    if loss is not None and loss not in LOSSES:
        raise ValueError(f"gather got loss={loss!r}; choose one of {', '.join(LOSSES)}")
    counts = step.plan.rows_per_rank.tolist()
    alone = len(step.parts) == step.plan.num_ranks
    if alone or not (rows.requires_grad and torch.is_grad_enabled()):
        return gather_samples(step.plan, step.transport.gather(rows, counts))
    if loss is None:
        raise ValueError(
            "gather got rows that require gradients: say loss='replicated' if every rank computes "
            "the same loss from what it gets, loss='summed' if the loss is the sum of what ranks "
            "compute; or give rows.detach()"
        )
    return gather_samples(step.plan, list(_Gather.apply(rows, step, loss)))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, step: "Step", loss: str) -> tuple[Tensor, ...]:
        ctx.step, ctx.loss = step, loss
        return tuple(step.transport.gather(rows.detach(), step.plan.rows_per_rank.tolist()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        own = ctx.step.plan.rank
        if ctx.loss == "replicated":
            return grads[own], None, None
        counts = [len(grad) for grad in grads]
        total = ctx.step.transport.sum(torch.cat(grads))
        return torch.split(total, counts)[own], None, None
