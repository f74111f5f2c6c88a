"""Finds the plan of attention calls that name the executor instead of a handle.

Such a call means the latest plan. Activation checkpointing runs a layer's forward again during
backward, when another plan may have been prepared: the call must then get the plan of its own
forward, or raise. Torch's two kinds of checkpointing are recognised by their frames on the stack:

- reentrant: the first forward runs under no_grad; what it used is kept with the checkpoint.
- non-reentrant: the first forward has a graph, which keeps a record of the call alive. A
  recomputation belongs to one of those; it is certain where all have the same plan.
"""

import sys
import weakref
from dataclasses import dataclass
from types import FrameType

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointFunction

from dyncp.executor.step import Step

_FORWARD, _BACKWARD = CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__
_FILE, _UNPACK = torch.utils.checkpoint.__file__, "unpack_hook"
_KEPT = "dyncp_steps"  # on reentrant checkpoints: steps by call log


@dataclass(eq=False)
class CallRecord:
    """One call through the executor. Its graph keeps the record alive until backward has run."""

    step: Step


class CallLog:
    """The calls of one executor that may still be recomputed."""

    def __init__(self) -> None:
        self._with_graph: weakref.WeakSet[CallRecord] = weakref.WeakSet()

    def resolve(self, latest: Step, *, has_graph: bool) -> tuple[Step, CallRecord | None]:
        """The plan of a call through the executor, and the record that its graph has to keep."""
        forwards, recomputes = _checkpoint_frames()
        if recomputes is None and _in_backward():
            raise ValueError(_UNCERTAIN)
        step = latest if recomputes is None else self._recomputed(recomputes)
        for frame in forwards:
            frame.f_locals["ctx"].__dict__.setdefault(_KEPT, {}).setdefault(self, set()).add(step)
        if not has_graph:
            return step, None
        record = CallRecord(step)
        self._with_graph.add(record)
        return step, record

    def _recomputed(self, frame: FrameType) -> Step:
        steps: set[Step]
        if frame.f_code is _BACKWARD:
            steps = getattr(frame.f_locals["ctx"], _KEPT, {}).get(self, set())
        else:
            steps = {record.step for record in self._with_graph}
        if len(steps) != 1:
            raise ValueError(_UNCERTAIN)
        return next(iter(steps))


_UNCERTAIN = (
    "attention was called through the executor during backward (activation checkpointing), and "
    "which plan its forward had is not certain; pass the handle of prepare() to the layers: "
    "attention(step, q, k, v)"
)


def _checkpoint_frames() -> tuple[list[FrameType], FrameType | None]:
    """Frames of torch's checkpointing around this call: first forwards under no_grad, and the
    innermost one that recomputes."""
    forwards: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _FILE:
            if code is _BACKWARD or code.co_name == _UNPACK:
                return forwards, frame
            if code is _FORWARD:
                forwards.append(frame)
        frame = frame.f_back
    return forwards, None


def _in_backward() -> bool:
    """Whether autograd is running backward on this thread, as it is during recomputation."""
    return torch._C._current_graph_task_id() != -1


def backward_comes_again() -> bool:
    """Whether the backward that is running keeps its graph (retain_graph)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
