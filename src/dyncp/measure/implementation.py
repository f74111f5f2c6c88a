"""What all measured implementations of attention have in common."""

from collections.abc import Callable

import torch
from torch import Tensor

from dyncp.measure.dense import Results
from dyncp.measure.inputs import Inputs

# q [tokens, q heads, dim], k and v [tokens, kv heads, dim] give out like q.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Unavailable(ValueError):  # noqa: N818 - mostly a reason to leave something out
    """Why an implementation cannot run here, or not with this mask."""


def first_line(error: Exception) -> str:
    """What others' code failed with."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def forward(attend: Attend, inputs: Inputs) -> Callable[[], Tensor]:
    """A forward call that keeps what backward needs."""
    return lambda: attend(*inputs.qkv)


def backward(out: Tensor, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A backward call over a graph that stays; `out` is a result of `forward`."""
    return lambda: torch.autograd.grad(out, inputs.qkv, inputs.dout, retain_graph=True)


def results_of(attend: Attend, inputs: Inputs) -> Results:
    """Output and gradients of one call."""
    out = attend(*inputs.qkv)
    return Results(out.detach(), *torch.autograd.grad(out, inputs.qkv, inputs.dout))
