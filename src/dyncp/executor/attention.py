"""What attention layers call: `DCPAttn.apply(step, q, kv)` and `attention(step, q, k, v)`."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dyncp.executor.call import CallOptions, attend_backward, attend_forward
from dyncp.executor.executor import DCPExecutor
from dyncp.executor.recompute import CallRecord, in_backward
from dyncp.executor.step import Step
from dyncp.executor.workspace import accumulator_dtype
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
        return attention(step, q, *kv.unbind(1))


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
    inputs = (q, k, v) if sink is None else (q, k, v, sink)
    has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    handle, record = _resolve(step, has_graph=has_graph)
    handle.check_mask(mask, backward=has_graph)
    handle.check_inputs(q, k, v)
    if sink is not None and sink.shape != (q.shape[1],):
        raise ValueError(f"sink has shape {tuple(sink.shape)}; expected [{q.shape[1]}] (q heads)")
    options = CallOptions(mask, q.shape[-1] ** -0.5 if scale is None else float(scale))
    out: Tensor = _Attention.apply(handle, record, options, q, k, v, sink)  # type: ignore[no-untyped-call]
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
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
    ) -> Tensor:
        out, lse = attend_forward(step, options, q, k, v)
        if sink is not None:
            out, lse = _add_sink(out, lse, sink)
        ctx.save_for_backward(q, k, v, out, lse, *(() if sink is None else (sink,)))
        ctx.step, ctx.record, ctx.options = step, record, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        wide = accumulator_dtype(q.dtype)
        delta = (dout.to(wide) * out.to(wide)).sum(dim=-1)
        grads = attend_backward(ctx.step, ctx.options, (q, k, v), dout, lse, delta)
        if ctx.record is not None:
            ctx.record.done = True
        dq, dk, dv = (grad.to(q.dtype) for grad in grads)
        dsink = _sink_gradient(sinks[0], lse, delta) if sinks else None
        return None, None, None, dq, dk, dv, dsink


def _add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax with one more logit per head: the output shrinks by the sink's share."""
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * torch.exp(lse - total).unsqueeze(-1)).to(out.dtype), total


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """−Σ rows (share of the sink) × delta: its value is 0, so only the normaliser moves."""
    share = torch.exp(sink.to(lse.dtype) - lse)
    return -(share * delta).sum(dim=0).to(sink.dtype)
