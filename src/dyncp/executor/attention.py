"""The function that attention layers call: `attention(step, q, k, v)`, or `attention(step, q, kv)`.

In graphs of torch.compile, attention is a single opaque operator. It gets the number of the step
(`Step.number`) instead of the step, so that one graph serves all batches. Inputs are checked when
the operator runs.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, is_autocast_enabled
from torch._compile import _disable_dynamo
from torch.library import custom_op
from torch.nn.functional import pad

from dyncp.checks import finite_number, instance_of
from dyncp.executor.call import attend_backward, attend_forward, empty_like, empty_per_head
from dyncp.executor.executor import DCPExecutor
from dyncp.executor.step import PreparedPlan, Step, step_of, unpacked
from dyncp.kernels import accumulator_dtype, share_of
from dyncp.plan import DEFAULT_MASK

SMALLEST_SCALE = 1e-30  # kernels keep the scale in fp32, which has no room for much smaller ones

PlannedCall = tuple[PreparedPlan, str, float]  # plan, name of the mask, scale of the scores


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
    packed into one tensor [tokens, 2, kv_heads, head_dim], whose gradient is then packed, too.

    `step` is the handle that `executor.prepare(plan)` returned. The executor itself stands for its
    latest handle, but layers that are recomputed in backward need the handle.
    `mask` is the name of one of the plan's masks. `scale` multiplies the scores (any finite number;
    default head_dim ** -0.5). `sink` [q_heads] are additional logits in each row's softmax, without
    a value; −∞ is none. With `padded`, tensors may have extra rows after the plan's rows: they are
    ignored, and their results are 0.
    """
    names = ("q", "kv") if v is None else ("q", "k", "v")
    inputs = (q, k) if v is None else (q, k, v)
    for name, tensor in zip(names, inputs, strict=True):
        instance_of(name, tensor, Tensor, "a torch tensor")
    if v is None and (k.ndim != 4 or k.shape[1] != 2):
        raise ValueError(
            f"kv has shape {tuple(k.shape)}; expected [tokens, 2, kv_heads, head_dim], or separate "
            "tensors k and v"
        )
    instance_of("mask", mask, str, "the name of one of the plan's masks")
    if scale is None:
        scale = float(max((*q.shape[-1:], 1)) ** -0.5)  # whether the shape fits is checked later
    else:
        q, scale = _with_positive_scale(q, _checked_scale(scale))
    call = (q, *inputs[1:]), mask, scale, sink
    if not torch.compiler.is_dynamo_compiling():
        return _eager_call(step, *call, padded=padded)
    if not isinstance(step, Step):
        return _untraced_call(step, *call, padded=padded)  # a graph break
    tensors = (step.number, *unpacked(*call[0]), sink)
    out: Tensor = torch.ops.dyncp.attention(*tensors, mask, scale, padded)[0]
    return out


class DCPAttn:
    """`DCPAttn.apply(step, q, kv)` is an alias of `attention(step, q, kv)`."""

    @staticmethod
    def apply(step: Step | DCPExecutor, q: Tensor, kv: Tensor) -> Tensor:
        """See `attention`."""
        return attention(step, q, kv)


def _checked_scale(scale: Any) -> float:
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError(
            "scale is a tensor that requires gradients, and would get none; pass a number, and "
            "multiply q by the tensor instead"
        )
    return finite_number("scale", scale)


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """q and a positive scale with the same product. Kernels need scale > 0: they may look for a
    row's largest score before they multiply, and they mask with −∞."""
    if scale < 0:
        q, scale = -q, -scale
    return (q, scale) if scale >= SMALLEST_SCALE else (q * scale, 1.0)


def _eager_call(
    step: Step | DCPExecutor,
    inputs: tuple[Tensor, ...],
    mask: str,
    scale: float,
    sink: Tensor | None,
    *,
    padded: bool,
) -> Tensor:
    """`inputs` are q, k, v, or q and packed kv."""
    step, num_rows = _resolve(step), len(inputs[0])
    if padded:
        inputs = tuple(x[: step.num_rows] for x in inputs)
    leaves = inputs if sink is None else (*inputs, sink)
    has_graph = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    prepared = check_call(step, inputs, mask, sink, backward=has_graph)
    out: Tensor = _Attention.apply((prepared, mask, scale), sink, *inputs)  # type: ignore[no-untyped-call]
    return pad(out, (0, 0, 0, 0, 0, num_rows - step.num_rows)) if padded else out


_untraced_call = _disable_dynamo(_eager_call)  # torch.compiler.disable takes 1 s to import


def _resolve(step: Step | DCPExecutor) -> Step:
    if isinstance(step, Step):
        return step
    if not isinstance(step, DCPExecutor):
        raise ValueError(
            f"the first argument of attention is {type(step).__name__}; expected the handle that "
            "executor.prepare(plan) returns, or the executor"
        )
    if torch._C._current_graph_task_id() != -1:
        raise ValueError(
            "attention was called with the executor during backward (activation checkpointing), "
            "where the plan of the forward is not known; pass the handle of prepare() to the "
            "layers: attention(step, q, k, v)"
        )
    return step.latest


def check_call(
    step: Step, inputs: tuple[Tensor, ...], mask: str, sink: Tensor | None, *, backward: bool
) -> PreparedPlan:
    """Raises ValueError if the call does not fit the plan. Returns the plan prepared for a kernel
    that supports these inputs."""
    if sink is not None:
        _check_sink(sink, inputs[0])
    prepared = step.prepared
    prepared.check(mask, inputs, backward=backward)
    return prepared.fitting(inputs)


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
    if sink.device.type == "cpu":  # on a GPU, looking at it would make the host wait
        _check_sink_values(sink.detach().to(accumulator_dtype(q.dtype)))


def _check_sink_values(sink: Tensor) -> None:
    wrong = torch.nonzero(~(sink < torch.inf)).flatten().tolist()
    if wrong:
        raise ValueError(
            f"sink is {sink[wrong[0]].item()} for q head {wrong[0]}; a sink is a number, or −∞ for "
            "a head without one (numbers above 65,504 are infinite in fp16)"
        )


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Switches autocast off in `function`: it would round intermediate results of kernels."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        devices = [name for name in ("cpu", "cuda") if is_autocast_enabled(name)]
        for name in devices:  # torch.autocast would take 8 times as long
            torch.set_autocast_enabled(name, False)
        try:
            return function(*arguments)
        finally:
            for name in devices:
                torch.set_autocast_enabled(name, True)

    return run


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out and log-sum-exp. Received blocks are sent again in backward."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        call: PlannedCall,
        sink: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        out, lse = _forward_with_sink(call, sink, unpacked(*inputs))
        ctx.save_for_backward(out, lse, sink, *inputs)
        ctx.call = call
        return out

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        out, lse, sink, *inputs = ctx.saved_tensors
        with torch.no_grad():
            grads = [empty_like(x) for x in inputs]
            tensors = unpacked(*inputs), (out, lse), dout, unpacked(*grads)
            dsink = _backward_with_sink(ctx.call, sink, *tensors)
            if dsink is not None:
                grads.append(dsink)
        if torch.is_grad_enabled():  # create_graph=True
            leaves = inputs if sink is None else (*inputs, sink)
            grads = list(_Once.apply(len(grads), *grads, dout, *leaves))  # type: ignore[no-untyped-call]
        dsink = None if sink is None else grads.pop()
        return None, dsink, *grads


class _Once(torch.autograd.Function):
    """Connects gradients to their inputs, so that a second derivative raises instead of being 0."""

    @staticmethod
    def forward(ctx: Any, num_grads: int, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(grad.view_as(grad) for grad in tensors[:num_grads])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        raise RuntimeError(
            "attention was differentiated twice; dyncp has no second derivatives. For Hessians, "
            "use torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH on whole "
            "sequences"
        )


def _forward_with_sink(
    call: PlannedCall, sink: Tensor | None, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as from `attend_forward`. The sink is one more logit per head, so the
    output shrinks by the sink's share of the softmax."""
    out, lse = attend_forward(*call, *inputs)
    if sink is None:
        return out, lse
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * share_of(lse, total).unsqueeze(-1)).to(out.dtype), total


def _backward_with_sink(
    call: PlannedCall,
    sink: Tensor | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> Tensor | None:
    """Writes the gradients of q, k and v, and returns that of the sink: −Σ over rows of the sink's
    share of the softmax × the row sum of dO·O, since the sink only affects the normaliser."""
    attend_backward(*call, inputs, results, dout, grads)
    if sink is None:
        return None
    out, lse = results
    delta = (dout.to(lse.dtype) * out).sum(dim=-1)
    share = share_of(sink.to(lse.dtype), lse)
    return -(share * delta).sum(dim=0).to(sink.dtype)


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
    """Output (like q) and log-sum-exp [q heads, tokens], including padding rows."""
    step = step_of(number)
    rows = step.num_rows if padded else len(q)
    given = q[:rows], k[:rows], v[:rows]
    prepared = check_call(step, given, mask, sink, backward=False)
    out, lse = _forward_with_sink((prepared, mask, scale), sink, given)
    all_out, all_lse = _outputs_of(q)
    all_out[:rows], all_lse[:, :rows] = out, lse.T
    all_out[rows:], all_lse[:, rows:] = 0, 0
    return all_out, all_lse


@traced_attention.register_fake
def _(_number: Tensor, q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
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
    """Gradients of q, k, v and the sink; the last is empty if there is no sink."""
    step = step_of(number)
    rows = step.num_rows if padded else len(q)
    given = q[:rows], k[:rows], v[:rows]
    prepared = check_call(step, given, mask, sink, backward=True)
    own_lse = empty_per_head(given[0])
    own_lse.copy_(lse[:, :rows].T)
    grads = empty_like(q), empty_like(k), empty_like(v)
    for grad in grads:
        grad[rows:] = 0
    own_grads = grads[0][:rows], grads[1][:rows], grads[2][:rows]
    results = out[:rows], own_lse
    call = prepared, mask, scale
    dsink = _backward_with_sink(call, sink, given, results, dout[:rows], own_grads)
    return *grads, q.new_empty(0) if dsink is None else dsink


@traced_backward.register_fake
def _(
    _number: Tensor, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *_: Any
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
