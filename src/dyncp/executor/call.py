"""One attention call of a prepared step, forward and backward, on all ranks of this process."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.executor.lowering import LoweredProgram
from dyncp.executor.run import Runner, drive
from dyncp.executor.step import Step
from dyncp.executor.workspace import Workspace, accumulator_dtype, with_slots
from dyncp.plan import Direction, HeadGroup, Space


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What one call may choose: the mask by name and the factor on the scores."""

    mask: str
    scale: float


def attend_forward(
    step: Step, options: CallOptions, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output like q, and log-sum-exp [tokens, q heads] in the accumulator dtype."""
    q, k, v = _dense_rows(q, k, v)
    groups = step.groups_of(q, k)
    runs = []
    for program, rows in step.programs(options.mask, Direction.FORWARD):
        spaces = []
        for g, group in enumerate(groups):
            inputs = _group_inputs(program, g, group, q[rows], k[rows], v[rows])
            num_rows = len(inputs["q"])
            wide = accumulator_dtype(q.dtype)
            inputs["out"] = torch.zeros_like(inputs["q"], dtype=wide)
            inputs["lse"] = torch.full(
                (num_rows, inputs["q"].shape[1]), -torch.inf, dtype=wide, device=q.device
            )
            spaces.append(Workspace(inputs, step.partial_dtype(q.dtype)))
        runs.append((program, spaces))
    _run(step, runs, options)
    out = _join(runs, "out", groups).to(q.dtype)
    return out, _join(runs, "lse", groups)


def attend_backward(
    step: Step,
    options: CallOptions,
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in the accumulator dtype, from dO, the final log-sum-exp and the row
    sums of dO·O."""
    q, k, v, dout = _dense_rows(*inputs, dout)
    groups = step.groups_of(q, k)
    runs = []
    for program, rows in step.programs(options.mask, Direction.BACKWARD):
        spaces = []
        for g, group in enumerate(groups):
            tensors = _group_inputs(program, g, group, q[rows], k[rows], v[rows])
            heads, num_rows = _q_heads(group, q, k), len(tensors["q"])
            for name, rows_of in (("dout", dout), ("lse", lse), ("delta", delta)):
                tensors[name] = with_slots(rows_of[rows][:, heads], num_rows)
            for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
                tensors[name] = torch.zeros_like(tensors[like], dtype=accumulator_dtype(q.dtype))
            spaces.append(Workspace(tensors, step.partial_dtype(q.dtype)))
        runs.append((program, spaces))
    _run(step, runs, options)
    return _join(runs, "dq", groups), _join(runs, "dk", groups), _join(runs, "dv", groups)


def _dense_rows(*tensors: Tensor) -> list[Tensor]:
    """Kernels read rows whose last dimension is contiguous; other strides are free."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _q_heads(group: HeadGroup, q: Tensor, k: Tensor) -> slice:
    repeat = q.shape[1] // k.shape[1]
    first = group.first_kv_head * repeat
    return slice(first, first + group.num_kv_heads * repeat)


def _group_inputs(
    program: LoweredProgram, g: int, group: HeadGroup, q: Tensor, k: Tensor, v: Tensor
) -> dict[str, Tensor]:
    kv_heads = slice(group.first_kv_head, group.first_kv_head + group.num_kv_heads)
    q_rows, k_rows = (int(program.workspace_rows[space, g]) for space in (Space.Q, Space.KV))
    return {
        "q": with_slots(q[:, _q_heads(group, q, k)], q_rows),
        "k": with_slots(k[:, kv_heads], k_rows),
        "v": with_slots(v[:, kv_heads], k_rows),
    }


def _run(
    step: Step, runs: list[tuple[LoweredProgram, list[Workspace]]], options: CallOptions
) -> None:
    channels = step.transport.open()
    runners = [
        Runner(program, spaces, step.kernel, channel, options.scale)
        for (program, spaces), channel in zip(runs, channels, strict=True)
    ]
    drive(runners)


def _join(
    runs: list[tuple[LoweredProgram, list[Workspace]]], name: str, groups: tuple[HeadGroup, ...]
) -> Tensor:
    """Own rows of all ranks below each other, head groups side by side."""
    ranks = []
    for program, spaces in runs:
        own = [space.tensors[name][: program.local_rows] for space in spaces]
        ranks.append(own[0] if len(groups) == 1 else torch.cat(own, dim=1))
    return ranks[0] if len(ranks) == 1 else torch.cat(ranks)
