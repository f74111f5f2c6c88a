"""Attention as an operator of compiled graphs: torch.compile does not look inside.

A graph holds the number of its step (`Step.number`) instead of the step, so one graph serves all
batches. Everything is checked when the operator runs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from dyncp.executor.attention import (
    backward_with_sink,
    check_call,
    forward_with_sink,
    without_autocast,
)
from dyncp.executor.call import CallOptions, Saved, empty_like, empty_per_head
from dyncp.executor.numbers import step_of
from dyncp.kernels import accumulator_dtype


@custom_op("dyncp::attention", mutates_args=())
@without_autocast
def traced_attention(
    number: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    mask: str,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor]:
    """Output like q, and log-sum-exp [q heads, tokens]; also of rows that only pad."""
    step = step_of(number)
    rows = step.num_rows if padded else len(q)
    given = q[:rows], k[:rows], v[:rows]
    step = check_call(step, given, mask, sink, backward=False)
    out, lse = forward_with_sink(step, CallOptions(mask, scale), sink, *given)
    all_out, all_lse = _outputs_of(q)
    all_out[:rows], all_lse[:, :rows] = out, lse.T
    all_out[rows:], all_lse[:, rows:] = 0, 0
    return all_out, all_lse


@traced_attention.register_fake
def _(
    number: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,  # noqa: ARG001
    sink: Tensor | None,  # noqa: ARG001
    mask: str,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    padded: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return _outputs_of(q)


def _outputs_of(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator_dtype(q.dtype))


@custom_op("dyncp::attention_backward", mutates_args=())
@without_autocast
def traced_backward(  # noqa: PLR0913, PLR0917
    number: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    mask: str,
    scale: float,
    padded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sink; of the latter without entries where there is none."""
    step = step_of(number)
    rows = step.num_rows if padded else len(q)
    given = q[:rows], k[:rows], v[:rows]
    step = check_call(step, given, mask, sink, backward=True)
    of_rows = empty_per_head(given[0])
    of_rows.copy_(lse[:, :rows].T)
    grads = empty_like(q), empty_like(k), empty_like(v)
    for grad in grads:
        grad[rows:] = 0
    saved = Saved(*given, out[:rows], of_rows, dout[:rows])
    own = grads[0][:rows], grads[1][:rows], grads[2][:rows]
    dsink = backward_with_sink(step, CallOptions(mask, scale), sink, saved, own)
    return *grads, q.new_empty(0) if dsink is None else dsink


@traced_backward.register_fake
def _(
    number: Tensor,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsink = q.new_empty(0) if sink is None else empty_like(sink)
    return empty_like(q), empty_like(k), empty_like(v), dsink


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    number, q, k, v, sink, *ctx.options = inputs
    ctx.save_for_backward(number, q, k, v, sink, *output)


def _differentiate(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dq, dk, dv, dsink = torch.ops.dyncp.attention_backward(*saved, dout, *ctx.options)
    return None, dq, dk, dv, None if saved[4] is None else dsink, None, None, None


traced_attention.register_autograd(_differentiate, setup_context=_keep)
