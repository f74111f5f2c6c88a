"""What attention layers call: `attention(step, q, k, v)`, or `attention(step, q, kv)`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled
from torch._compile import _disable_dynamo
from torch.nn.functional import pad

from dyncp.checks import finite_number, instance_of
from dyncp.executor.call import (
    CallOptions,
    Saved,
    attend_backward,
    attend_forward,
    empty_like,
)
from dyncp.executor.executor import DCPExecutor
from dyncp.executor.recompute import CallRecord, backward_comes_again
from dyncp.executor.step import Step, unpacked
from dyncp.plan import DEFAULT_MASK

# Smaller factors on the scores leave the range of fp32, in which kernels have them.
SMALLEST_SCALE = 1e-30


def attention(
    step: Step | DCPExecutor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    mask: str = DEFAULT_MASK,
    scale: float | None = None,
    sink: Tensor | None = None,
    padded: bool = False,
) -> Tensor:
    """Attention of one layer: `attention(step, q, k, v)`, or `attention(step, q, kv)`.

    q and the result are [tokens, q_heads, head_dim]; k and v are [tokens, kv_heads, head_dim], or
    packed as one tensor [tokens, 2, kv_heads, head_dim], whose gradient is then packed, too.

    `step` is the handle of `executor.prepare(plan)`; the executor itself means its latest handle.
    `mask` names one of the plan's masks; `scale` multiplies the scores (default head_dim ** -0.5;
    any finite number); `sink` [q_heads] are logits that take part in each row's softmax without a
    value. With `padded`, tensors may have further rows behind the plan's: they take no part, and
    their results are 0.
    """
    inputs = _checked_kv(q, k) if v is None else _checked_qkv(q, k, v)
    instance_of("mask", mask, str, "the name of one of the plan's masks")
    if scale is None:
        scale = _default_scale(q)
    else:
        q, scale = _with_positive_scale(q, _checked_scale(scale))
    options = CallOptions(mask, scale)
    return _call(step, (q, *inputs[1:]), options, sink, padded=padded)


class DCPAttn:
    """`DCPAttn.apply(step, q, kv)` is an alias of `attention(step, q, kv)`."""

    @staticmethod
    def apply(step: Step | DCPExecutor, q: Tensor, kv: Tensor) -> Tensor:
        """See `attention`."""
        return attention(step, q, kv)


def _checked_kv(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
    for name, tensor in (("q", q), ("kv", kv)):
        instance_of(name, tensor, Tensor, "a torch tensor")
    if kv.ndim != 4 or kv.shape[1] != 2:
        raise ValueError(
            f"kv has shape {tuple(kv.shape)}; expected [tokens, 2, kv_heads, head_dim], or k and v "
            "as two tensors"
        )
    return q, kv


def _checked_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        instance_of(name, tensor, Tensor, "a torch tensor")
    return q, k, v


def _default_scale(q: Tensor) -> float:
    if not q.ndim or not q.shape[-1]:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; expected [tokens, heads, head_dim], with at least one "
            "entry per head"
        )
    return float(q.shape[-1] ** -0.5)


def _checked_scale(scale: Any) -> float:
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError(
            "scale is a tensor that requires gradients, and would get none; give a number, and "
            "multiply q by the tensor"
        )
    return finite_number("scale", scale)


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a factor above 0: kernels find the largest score of a row before or
    after they multiply, and mask with −∞."""
    if scale < 0:
        q, scale = -q, -scale
    return (q, scale) if scale >= SMALLEST_SCALE else (q * scale, 1.0)


def _call(
    step: Step | DCPExecutor,
    inputs: tuple[Tensor, ...],
    options: CallOptions,
    sink: Tensor | None,
    *,
    padded: bool,
) -> Tensor:
    if not torch.compiler.is_dynamo_compiling():
        return _padded_call(step, inputs, options, sink, padded=padded)
    if isinstance(step, Step):  # one opaque operator of the graph: see traced.py
        tensors = (step.number, *unpacked(*inputs), sink)
        out: Tensor = torch.ops.dyncp.attention(*tensors, options.mask, options.scale, padded)[0]
        return out
    return _untraced_call(step, inputs, options, sink, padded=padded)  # a graph break


def _padded_call(
    step: Step | DCPExecutor,
    inputs: tuple[Tensor, ...],
    options: CallOptions,
    sink: Tensor | None,
    *,
    padded: bool,
) -> Tensor:
    if not padded:
        return _eager_call(step, inputs, options, sink)
    rows = (step if isinstance(step, Step) else step.latest).num_rows
    out = _eager_call(step, tuple(x[:rows] for x in inputs), options, sink)
    return pad(out, (0, 0, 0, 0, 0, len(inputs[0]) - rows))


def _eager_call(
    step: Step | DCPExecutor,
    inputs: tuple[Tensor, ...],
    options: CallOptions,
    sink: Tensor | None,
) -> Tensor:
    """`inputs` are q, k, v, or q and packed kv, whose gradient is then packed, too."""
    leaves = inputs if sink is None else (*inputs, sink)
    has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    handle, record = _resolve(step, has_graph=has_graph)
    handle = check_call(handle, inputs, options.mask, sink, backward=has_graph)
    out: Tensor = _Attention.apply(handle, record, options, sink, *inputs)  # type: ignore[no-untyped-call]
    return out


def check_call(
    step: Step, inputs: tuple[Tensor, ...], mask: str, sink: Tensor | None, *, backward: bool
) -> Step:
    """Raises ValueError where a call does not fit the plan; gives the step for its kernel."""
    if sink is not None:
        _check_sink(sink, inputs[0])
    step.check(mask, inputs, backward=backward)
    return step.fitting(inputs)


def _check_sink(sink: Tensor, q: Tensor) -> None:
    instance_of("sink", sink, Tensor, "a torch tensor")
    if sink.shape != q.shape[1:2]:
        raise ValueError(
            f"sink has shape {tuple(sink.shape)}; expected {list(q.shape[1:2])} (q heads)"
        )
    if sink.device != q.device or not sink.is_floating_point():
        raise ValueError(
            f"sink is {sink.dtype} on {sink.device}; expected floating point on {q.device}, as q"
        )


_untraced_call = _disable_dynamo(_padded_call)  # torch.compiler.disable, which takes 1 s to import


def _resolve(step: Step | DCPExecutor, *, has_graph: bool) -> tuple[Step, CallRecord | None]:
    if isinstance(step, Step):
        return step, None
    if not isinstance(step, DCPExecutor):
        raise ValueError(
            f"the first argument of attention is {type(step).__name__}; expected the handle that "
            "executor.prepare(plan) returns, or the executor"
        )
    return step.calls.resolve(step.latest, has_graph=has_graph)


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Autocast would round what kernels compute with, in forward and wherever backward is
    called."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        if not (is_autocast_enabled("cpu") or is_autocast_enabled("cuda")):
            return function(*arguments)
        devices = [name for name in ("cpu", "cuda") if is_autocast_enabled(name)]
        for name in devices:
            torch.set_autocast_enabled(name, False)
        try:
            return function(*arguments)
        finally:
            for name in devices:
                torch.set_autocast_enabled(name, True)

    return run


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out and log-sum-exp; received blocks are sent again in backward."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        step: Step,
        record: CallRecord | None,
        options: CallOptions,
        sink: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        out, lse = forward_with_sink(step, options, sink, *unpacked(*inputs))
        ctx.save_for_backward(out, lse, sink, *inputs)
        ctx.step, ctx.record, ctx.options = step, record, options
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        out, lse, sink, *inputs = ctx.saved_tensors
        with torch.no_grad():
            grads = [empty_like(x) for x in inputs]
            saved = Saved(*unpacked(*inputs), out, lse, dout)
            dsink = backward_with_sink(ctx.step, ctx.options, sink, saved, unpacked(*grads))
            if dsink is not None:
                grads.append(dsink)
        if not backward_comes_again():
            ctx.record = None
        if torch.is_grad_enabled():  # create_graph=True
            leaves = inputs if sink is None else (*inputs, sink)
            grads = list(_Once.apply(len(grads), *grads, dout, *leaves))  # type: ignore[no-untyped-call]
        dsink = None if sink is None else grads.pop()
        return None, None, None, dsink, *grads


class _Once(torch.autograd.Function):
    """Keeps gradients connected to what they depend on, so that a second derivative raises instead
    of being taken for 0."""

    @staticmethod
    def forward(ctx: Any, num_grads: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(grad.view_as(grad) for grad in tensors[:num_grads])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        raise RuntimeError(
            "attention was differentiated twice; dyncp has no second derivatives. Use "
            "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH on whole "
            "sequences for Hessians"
        )


def forward_with_sink(
    step: Step, options: CallOptions, sink: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as `attend_forward`."""
    out, lse = attend_forward(step, options, q, k, v)
    return (out, lse) if sink is None else _add_sink(out, lse, sink)


def backward_with_sink(
    step: Step,
    options: CallOptions,
    sink: Tensor | None,
    saved: Saved,
    grads: tuple[Tensor, Tensor, Tensor],
) -> Tensor | None:
    """Writes the gradients of q, k and v, and gives that of the sink."""
    attend_backward(step, options, saved, grads)
    return None if sink is None else _sink_gradient(sink, saved.lse, saved.dout, saved.out)


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
