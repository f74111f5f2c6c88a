"""What attention layers call: `DCPAttn.apply(step, q, kv)` and `attention(step, q, k, v)`."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dyncp.executor.call import (
    CallOptions,
    Saved,
    attend_backward,
    attend_forward,
    empty_like,
)
from dyncp.executor.executor import DCPExecutor
from dyncp.executor.recompute import CallRecord, in_backward
from dyncp.executor.step import Step, unpacked
from dyncp.plan import DEFAULT_MASK


class DCPAttn:
    """`out = DCPAttn.apply(step, q, kv)`: attention of one layer under the step's plan."""

    @staticmethod
    def apply(step: Step | DCPExecutor, q: Tensor, kv: Tensor) -> Tensor:
        """q is [tokens, q_heads, head_dim], kv is [tokens, 2, kv_heads, head_dim], out is like q.

        `step` is the handle of `executor.prepare(plan)`; the executor itself means its latest
        handle."""
        if kv.ndim != 4 or kv.shape[1] != 2:
            raise ValueError(
                f"kv has shape {tuple(kv.shape)}; expected [tokens, 2, kv_heads, head_dim]"
            )
        return _call(step, (q, kv), CallOptions(DEFAULT_MASK, q.shape[-1] ** -0.5), None)


def attention(
    step: Step | DCPExecutor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: str = DEFAULT_MASK,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of one layer. q: [tokens, q_heads, head_dim]; k, v: [tokens, kv_heads, head_dim].

    `mask` names one of the plan's masks; `scale` multiplies the scores (default head_dim ** -0.5);
    `sink` [q_heads] are logits that take part in each row's softmax without a value.
    """
    options = CallOptions(mask, q.shape[-1] ** -0.5 if scale is None else float(scale))
    return _call(step, (q, k, v), options, sink)


def _call(
    step: Step | DCPExecutor,
    inputs: tuple[Tensor, ...],
    options: CallOptions,
    sink: Tensor | None,
) -> Tensor:
    """`inputs` are q, k, v, or q and packed kv, whose gradient is then packed, too."""
    leaves = inputs if sink is None else (*inputs, sink)
    has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    handle, record = _resolve(step, has_graph=has_graph)
    handle.check(options.mask, inputs, backward=has_graph)
    handle = handle.fitting(inputs)
    if sink is not None and sink.shape != (q_heads := inputs[0].shape[1],):
        raise ValueError(f"sink has shape {tuple(sink.shape)}; expected [{q_heads}] (q heads)")
    out: Tensor = _Attention.apply(handle, record, options, sink, *inputs)  # type: ignore[no-untyped-call]
    return out


def _resolve(step: Step | DCPExecutor, *, has_graph: bool) -> tuple[Step, CallRecord | None]:
    if isinstance(step, Step):
        return step, None
    if not isinstance(step, DCPExecutor):
        raise ValueError(
            f"the first argument of attention is {type(step).__name__}; expected the handle that "
            "executor.prepare(plan) returns, or the executor"
        )
    latest = step.latest
    if in_backward():
        step.calls.check_recomputation(latest)
        return latest, None
    return latest, step.calls.add(latest, has_graph=has_graph)


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out and log-sum-exp; received blocks are sent again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        record: CallRecord | None,
        options: CallOptions,
        sink: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        out, lse = attend_forward(step, options, *unpacked(*inputs))
        if sink is not None:
            out, lse = _add_sink(out, lse, sink)
        ctx.save_for_backward(out, lse, sink, *inputs)
        ctx.step, ctx.record, ctx.options = step, record, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        out, lse, sink, *inputs = ctx.saved_tensors
        grads = [empty_like(x) for x in inputs]
        (q, k, v), (dq, dk, dv) = unpacked(*inputs), unpacked(*grads)
        attend_backward(ctx.step, ctx.options, Saved(q, k, v, out, lse, dout), (dq, dk, dv))
        if ctx.record is not None:
            ctx.record.done = True
        dsink = None if sink is None else _sink_gradient(sink, lse, dout, out)
        return None, None, None, dsink, *grads


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax with one more logit per head: the output shrinks by the sink's share."""
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * torch.exp(lse - total).unsqueeze(-1)).to(out.dtype), total


def _sink_gradient(sink: Tensor, lse: Tensor, dout: Tensor, out: Tensor) -> Tensor:
    """−Σ rows (share of the sink) × row sum of dO·O: its value is 0, so only the normaliser
    moves."""
    delta = (dout.to(lse.dtype) * out).sum(dim=-1)
    share = torch.exp(sink.to(lse.dtype) - lse)
    return -(share * delta).sum(dim=0).to(sink.dtype)
